from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shapeshift.engines import checkpoint
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "owner" / "model"
    made.mkdir(parents=True)
    (made / "config.json").write_text('{"hidden_size": 8}')
    (made / "tokenizer.json").write_text("{}")
    (made / "model-1.safetensors").write_bytes(b"one")
    (made / "model-2.safetensors").write_bytes(b"two")
    return made


def test_opens(folder: Path) -> None:
    opened = checkpoint.open_checkpoint(folder)
    assert opened.config == {"hidden_size": 8}
    assert opened.tokenizer_file == folder / "tokenizer.json"
    assert opened == checkpoint.open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors"])
def test_hash_depends_on_every_file_of_an_engine(folder: Path, name: str) -> None:
    before = checkpoint.open_checkpoint(folder).sha256
    (folder / name).write_text(json.dumps({"changed": 1}))
    assert checkpoint.open_checkpoint(folder).sha256 != before


def test_hash_ignores_other_files_but_not_names(folder: Path) -> None:
    before = checkpoint.open_checkpoint(folder).sha256
    (folder / "README.md").write_text("about")
    assert checkpoint.open_checkpoint(folder).sha256 == before
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")
    assert checkpoint.open_checkpoint(folder).sha256 != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(InvalidInputError, match=f"checkpoint: .*must hold {name}"):
        checkpoint.open_checkpoint(folder)


def test_unsafe_weights_are_rejected_by_name(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(InvalidInputError, match=r"checkpoint: .*; weights must be \*.safetensors"):
        checkpoint.open_checkpoint(folder)
    for name in ("pytorch_model.bin", "model.pt", "weights.ckpt", "old.pkl", "tf_model.h5"):
        (folder / name).write_bytes(b"x")
    with pytest.raises(InvalidInputError) as caught:
        checkpoint.open_checkpoint(folder)
    assert "found only model.pt, old.pkl, pytorch_model.bin, tf_model.h5, weights.ckpt, which can execute code" in str(
        caught.value
    )


def test_unsafe_files_beside_safetensors_are_not_read(folder: Path) -> None:
    before = checkpoint.open_checkpoint(folder).sha256
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert checkpoint.open_checkpoint(folder).sha256 == before


def test_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(InvalidInputError, match=r"checkpoint: .*; not JSON: Expecting"):
        checkpoint.open_checkpoint(folder)


def test_finds_a_folder_by_path_and_in_the_search_folders(folder: Path, tmp_path: Path) -> None:
    assert checkpoint.find(str(folder)) == folder
    assert checkpoint.find("model", [tmp_path / "absent", folder.parent]) == folder
    assert checkpoint.find("owner/model", [tmp_path]) == folder


@pytest.mark.parametrize("name", ["absent", "./owner/absent", "/owner/absent", "../absent", "a/b/c"])
def test_invalid_hub_ids_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=pytest.fail))
    with pytest.raises(NotFoundError) as caught:
        checkpoint.find(name, [tmp_path])
    assert "give a folder or a hub id such as owner/model" in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_hub_id_is_downloaded_as_safetensors_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    assert checkpoint.find("other/model", [tmp_path]) == folder
    ((name, patterns),) = asked
    assert name == "other/model"
    assert "*.safetensors" in patterns and not any("bin" in pattern or pattern == "*" for pattern in patterns)


def test_hub_error_lists_every_searched_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, allow_patterns: list[str]) -> str:
        raise RuntimeError("offline\nand more lines")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(NotFoundError) as caught:
        checkpoint.find("other/model", [tmp_path])
    text = str(caught.value)
    assert str(tmp_path / "other/model") in text and "'other/model' (offline)" in text and "more" not in text


def test_hub_id_without_huggingface_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EngineError, match="needs huggingface_hub; run `pip install huggingface_hub`"):
        checkpoint.find("other/model", [tmp_path])
