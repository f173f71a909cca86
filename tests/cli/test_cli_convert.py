"""`shapeshift convert`: BGE-M3 as it is published, from pickles to its three vectors by a front."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shapeshift.cli.main import main
from shapeshift.polymorph.front import TextFront
from shapeshift.serving import model_args
from tests.engines.families import save_model, save_modules
from tests.engines.test_engines_vectors import of_flag_embedding, save_token_heads
from tests.fakes import PbUtils, Request, as_served, text_request
from tests.polymorph.conftest import args_of

TEXTS = ("w5 w6 w5 w7 w6 w8", "w1 w50", "w3 w9 w11 w12 unknown")


class Evil:
    """What runs a program when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def as_published(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Replace the safetensors of a small checkpoint by the pickles that BGE-M3 has; returns its heads."""
    save_modules(save_model(folder, "xlm-roberta"), pooling="cls")
    heads = save_token_heads(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    for name, tensors in heads.items():
        torch.save(tensors, folder / f"{name}.pt")
        (folder / f"{name}.safetensors").unlink()
    (folder / "model.safetensors").unlink()
    return heads


def test_the_three_vectors_of_a_published_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "m3"
    heads = as_published(folder)
    assert main(["add", str(folder)]) == 2, "a pickle is read by no build"
    assert main(["convert", str(folder)]) == 0
    readers = {file.stat().st_mode & 0o444 for file in folder.glob("*.safetensors")}
    assert readers == {folder.stat().st_mode & 0o444}, "those who may list the folder"
    assert main(["convert", str(folder)]) == 2, "nothing is left"
    assert main(["add", str(folder), "--as", "m3"]) == 0
    config = Path("model_repository/m3/config.pbtxt")
    text = config.read_text()
    for name, value in (("bins", "none"), ("precision", "f32")):
        stated = f'{{ key: "{name}" value {{ string_value: "{value}" }} }},'
        text = text.replace("parameters [", "parameters [" + stated)
    config.write_text(text)
    assert main(["engines", "m3"]) == 0
    front = as_served(TextFront(PbUtils(), model_args.read(args_of(tmp_path / "build" / "repository" / "m3"))))
    try:
        names = ["EMBEDDING", "SPARSE_INDICES", "SPARSE_VALUES", "TOKEN_EMBEDDING"]
        request, asked = text_request(*TEXTS, outputs=names), Request(("DESCRIPTION",))
        front.execute([request, asked])
        said = json.loads(asked.vectors("DESCRIPTION").item())
        assert [said["kind"], *said["also"]] == ["embedding", "sparse_embedding", "token_embedding"]
        for row, text in enumerate(TEXTS):
            dense, vectors, terms = of_flag_embedding(folder, heads, text)
            np.testing.assert_allclose(request.vectors("EMBEDDING")[row], dense, atol=1e-4)
            tokens = request.vectors("TOKEN_EMBEDDING")[row]
            np.testing.assert_allclose(tokens[tokens.any(1)], vectors, atol=1e-4)
            indices = request.vectors("SPARSE_INDICES")[row]
            assert indices[indices >= 0].tolist() == sorted(terms)
            weights = request.vectors("SPARSE_VALUES")[row][: len(terms)]
            np.testing.assert_allclose(weights, [terms[index] for index in sorted(terms)], atol=1e-4)
    finally:
        front.close()


def test_a_pickle_that_is_no_file_of_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("evil", Evil(tmp_path / "ran")), ("list", [1, 2]), ("empty", {})):
        folder = tmp_path / name
        folder.mkdir()
        if name == "evil":
            (folder / "sparse_linear.pt").write_bytes(pickle.dumps(content))
        else:
            torch.save(content, folder / "sparse_linear.pt")
        assert main(["convert", str(folder)]) == 2
        said = capsys.readouterr().err
        assert "shapeshift convert: INVALID_ARG: checkpoint: got" in said and "a file of weights" in said
        assert [path.name for path in folder.iterdir()] == ["sparse_linear.pt"]
    assert not (tmp_path / "ran").exists()
    assert main(["convert", str(tmp_path / "nothing")]) == 2
    assert "FOLDER: got" in capsys.readouterr().err


def test_shards_and_modules_become_what_a_build_reads(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    torch.save({"a": shared, "b": shared}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"c": torch.ones(2, 3).T}, tmp_path / "pytorch_model-00002-of-00002.bin")
    (tmp_path / "2_Dense").mkdir()
    torch.save({"linear.weight": torch.ones(2, 2)}, tmp_path / "2_Dense" / "pytorch_model.bin")
    assert main(["convert", str(tmp_path)]) == 0
    first = load_file(tmp_path / "model-00001-of-00002.safetensors")
    assert first["a"].tolist() == first["b"].tolist() == shared.tolist()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["a"] == "model-00001-of-00002.safetensors" and index["c"] == "model-00002-of-00002.safetensors"
    assert load_file(tmp_path / "2_Dense" / "model.safetensors")["linear.weight"].shape == (2, 2)
