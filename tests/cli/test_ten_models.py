"""A repository of ten models of which three are broken: seven serve, and each of the three has its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from shapeshift.cli.main import main
from shapeshift.triton.embedded.server import TritonServer
from tests.engines.families import save_model, save_modules

LABELS = {0: "bad", 1: "good", 2: "mixed"}
OUTPUTS = {
    "bert": "EMBEDDING",
    "distilbert": "EMBEDDING",
    "mpnet": "EMBEDDING",
    "albert": "EMBEDDING",
    "qwen3": "EMBEDDING",
    "electra": "LOGITS",
    "roberta": "TOKEN_LOGITS",
}
CLASSES = {"LOGITS": "AutoModelForSequenceClassification", "TOKEN_LOGITS": "AutoModelForTokenClassification"}


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def pooled_twice(folder: Path) -> None:
    listed = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*listed[:2], listed[1], *listed[2:]]))


def without_a_label(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "bad", "2": "good"}}))


# File, field and remedy of each.
BROKEN: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...]]] = {
    "shard": (
        without_a_shard,
        "",
        ("checkpoint: got ", "model-00002-of-00002", "download is not complete"),
    ),
    "pooling": (pooled_twice, "", ("modules.json: got '2 poolings'", "one Pooling in ", "/pooling/modules.json")),
    "label": (without_a_label, "LOGITS", ("id2label: got ['0', '2']", "in config.json", "1 is missing: add it")),
}


def make(folder: Path, model_type: str, output: str) -> None:
    if output in CLASSES:
        save_model(folder, model_type, CLASSES[output], id2label=LABELS)
    else:
        save_modules(save_model(folder, model_type), "lasttoken" if model_type == "qwen3" else "cls")


@pytest.mark.long
@pytest.mark.server
def test_seven_of_ten_models_serve_and_three_reasons_are_given(
    tmp_path: Path,
    make_server: Callable[..., TritonServer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, output in OUTPUTS.items():
        make(tmp_path / name, name, output)
        assert main(["add", name]) == 0
    for name, (spoil, output, _) in BROKEN.items():
        make(tmp_path / name, "bert", output)
        assert main(["add", name]) == 0
        spoil(tmp_path / name)
    assert len(list((tmp_path / "model_repository").iterdir())) == 10
    assert main(["validate"]) == 1
    capsys.readouterr()
    assert main(["engines"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"not published: {', '.join(sorted(BROKEN))}"
    for name, (_, _, parts) in BROKEN.items():
        (line,) = (line for line in said[:-1] if line.startswith(f"{name}: ") and " s  " not in line)
        assert all(part in line for part in parts), line
    assert main(["serve", "--print-models"]) == 0
    served = capsys.readouterr().out.split()
    assert served == sorted(OUTPUTS)
    with make_server((tmp_path / "build" / "repository",), tuple(served), tmp_path / "run") as server:
        server.wait_ready()
        answers = {name: infer(server.grpc_url, name, output) for name, output in OUTPUTS.items()}
    assert {name: answer.shape for name, answer in answers.items()} == {
        name: {"EMBEDDING": (1, 16), "LOGITS": (1, 3), "TOKEN_LOGITS": (1, 4, 3)}[output]
        for name, output in OUTPUTS.items()
    }
    assert all(np.isfinite(answer).all() for answer in answers.values())


def infer(url: str, model: str, output: str) -> Any:
    text = triton.InferInput("TEXT", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([["w1 w2"]], dtype=object))
    with triton.InferenceServerClient(url) as client:
        return client.infer(model, [text], client_timeout=120).as_numpy(output)
