"""`make engines` for checkpoints that cannot be served: one line each, and nothing of them is published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shapeshift.cli.main import main
from shapeshift.engines import manifest
from shapeshift.triton import model_config
from tests.engines.families import VOCABULARY, save_model, save_modules

POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}


@pytest.fixture
def checkpoint(tmp_path: Path, light_checkpoint: Path) -> Path:
    """A folder of sentence-transformers that pools by cls."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(light_checkpoint, folder)
    write(folder, "modules.json", [TRANSFORMER, POOLING])
    write(folder, "1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    return folder


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def change(folder: Path, **values: Any) -> None:
    """Change config.json; a value of None removes its key."""
    config = {**json.loads((folder / "config.json").read_text()), **values}
    write(folder, "config.json", {name: value for name, value in config.items() if value is not None})


SHARDS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    write(folder, "model.safetensors.index.json", SHARDS)


BROKEN: dict[str, tuple[Callable[[Path], object], dict[str, object], str]] = {
    "no model": (lambda at: (at / "config.json").unlink(), {}, "must hold config.json"),
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), {}, "must hold tokenizer.json"),
    "missing shard": (
        without_a_shard,
        {},
        "must hold model-2.safetensors, which model.safetensors.index.json lists: the download is not complete",
    ),
    "missing pooling": (lambda at: shutil.rmtree(at / "1_Pooling"), {}, "must hold 1_Pooling/config.json"),
    "two poolings": (lambda at: write(at, "modules.json", [TRANSFORMER, POOLING, POOLING]), {}, "one Pooling in"),
    "another pooling": (
        lambda at: None,
        {"pooling": "mean"},
        "pooling: got 'mean'; cls, as the modules of the checkpoint say; remove `pooling` from config.pbtxt",
    ),
    "another tokenizer": (
        lambda at: change(at, vocab_size=30000),
        {},
        "tokenizer.json: got 'id 30521'; ids below 30000, the vocab_size of config.json",
    ),
    "no type": (lambda at: change(at, model_type=None), {}, "model_type: got None"),
    "a decoder": (
        lambda at: change(at, model_type="phi3", architectures=["Phi3ForSequenceClassification"]),
        {},
        "model_type phi3 is a decoder that polymorph does not serve; it serves bert,",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_is_one_line_and_the_others_are_published(
    kind: str,
    checkpoint: Path,
    tmp_path: Path,
    add_front: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil, parameters, message = BROKEN[kind]
    monkeypatch.chdir(tmp_path)
    add_front(tmp_path / "model_repository", "good")
    add_front(tmp_path / "model_repository", "broken", checkpoint=checkpoint, **parameters)
    spoil(checkpoint)
    assert main(["engines"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("broken: ")]
    assert message in line and "traceback" not in line.lower()
    assert [path.name for path in (tmp_path / "build" / "engines").iterdir()] == ["good"]
    assert [path.name for path in (tmp_path / "build" / "repository").iterdir()] == ["good"]


def test_a_label_map_that_misses_an_id_is_refused(
    checkpoint: Path,
    tmp_path: Path,
    add_front: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    change(checkpoint, id2label={"0": "no", "2": "yes"})
    folder = add_front(tmp_path / "model_repository", "front", checkpoint=checkpoint)
    # What is not served does not matter.
    assert main(["engines"]) == 0
    text = (folder / "config.pbtxt").read_text().replace("EMBEDDING", "LOGITS").replace("dims: [ 8 ]", "dims: [ 2 ]")
    (folder / "config.pbtxt").write_text(text)
    assert main(["engines"]) == 1
    assert "id2label: got ['0', '2']; a name for each id from 0 in config.json; 1 is missing" in capsys.readouterr().err


def test_a_model_without_fused_attention_is_built_from_its_modules(
    tmp_path: Path, add_front: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_modules(save_model(tmp_path / "mpnet", "mpnet"), pooling="max")
    chosen = {"provider": "openvino", "bins": "none", "max_tokens": 32, "profile_file": ""}
    folder = add_front(tmp_path / "model_repository", "front", checkpoint=model, **chosen)
    text = (folder / "config.pbtxt").read_text().replace("dims: [ 8 ]", "dims: [ 16 ]")
    (folder / "config.pbtxt").write_text(text)
    assert main(["engines"]) == 0
    made = manifest.load(tmp_path / "build" / "engines" / "front")
    assert made.packs_rows and made.position_offset == 2 and made.vocabulary == VOCABULARY
    (engine,) = made.engines
    assert engine.min_cosine > 0.99999
    generated = model_config.parameters(model_config.read(tmp_path / "build/repository/front/config.pbtxt"))
    assert (generated["pooling"], generated["normalize"]) == ("max", "true")
