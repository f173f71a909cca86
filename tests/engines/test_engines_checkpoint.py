from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shapeshift import files
from shapeshift.engines import checkpoint
from shapeshift.errors import InvalidInputError
from shapeshift.files import file_sha256


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


def test_the_same_weights_for_another_library_are_left_out(folder: Path) -> None:
    before = checkpoint.open_checkpoint(folder).sha256
    (folder / "consolidated.safetensors").write_bytes(b"one and two")
    assert checkpoint.open_checkpoint(folder).sha256 == before
    for name in ("model-1", "model-2"):
        (folder / f"{name}.safetensors").unlink()
    assert checkpoint.weight_files(folder) == [folder / "consolidated.safetensors"], "unless there are no others"


def test_weights_are_hashed_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def sha256(path: Path) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(files, "file_sha256", sha256)
    store, weights = tmp_path / "hashes.json", folder / "model-1.safetensors"
    for file in folder.glob("*.safetensors"):
        os.utime(file, (1e9, 1e9))
    made = [checkpoint.open_checkpoint(folder, hashes=store).sha256 for _ in range(2)]
    assert hashed == ["model-1.safetensors", "model-2.safetensors"]
    assert made == [checkpoint.open_checkpoint(folder).sha256] * 2
    hashed.clear()
    weights.write_bytes(b"two")
    # A change within the resolution of the clock would not be seen: the file is too young to remember.
    for _ in range(2):
        assert checkpoint.open_checkpoint(folder, hashes=store).sha256 != made[0]
    assert hashed == ["model-1.safetensors"] * 2
    store.write_text("[")
    weights.write_bytes(b"one")
    assert checkpoint.open_checkpoint(folder, hashes=store).sha256 == made[0]


@pytest.mark.parametrize("changed", ["size", "time", "inode"])
def test_a_changed_file_is_hashed_again(tmp_path: Path, changed: str) -> None:
    file, store = tmp_path / "weights", tmp_path / "hashes.json"
    file.write_bytes(b"one")
    os.utime(file, (1e9, 1e9))
    files.RememberedHashes(store).sha256(file)
    if changed == "inode":
        file.rename(tmp_path / "older")
    file.write_bytes(b"longer" if changed == "size" else b"two")
    os.utime(file, (1e9, 1e9 + (changed == "time")))
    assert files.RememberedHashes(store).sha256(file) == file_sha256(file)


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
    assert checkpoint.find_folder(str(folder)) == folder
    assert checkpoint.find_folder("model", [tmp_path / "absent", folder.parent]) == folder
    assert checkpoint.find_folder("owner/model", [tmp_path]) == folder


def test_a_name_means_the_same_wherever_a_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "checkpoints", tmp_path):
        (place / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    search = [tmp_path / "checkpoints"]
    assert checkpoint.find_folder("owner/model", search) == tmp_path / "checkpoints" / "owner" / "model"
    assert checkpoint.find_folder("./owner/model", search) == tmp_path / "owner" / "model"
    assert checkpoint.find_folder("owner/model", [tmp_path / "absent"]) == tmp_path / "owner" / "model"
    assert checkpoint.find_folder("../absent", search) is None


def test_weights_in_one_file_count_before_shards(folder: Path) -> None:
    """As in transformers, also where shards of another download are missing."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-0.safetensors"}}')
    (folder / "model.safetensors").write_bytes(b"whole")
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    checkpoint.open_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "part-0.safetensors")
    (folder / "part-7.safetensors").write_bytes(b"of another index")
    assert checkpoint.weight_files(folder) == [folder / "part-0.safetensors"]


def test_a_folder_that_is_not_found_names_where_it_was_searched(tmp_path: Path) -> None:
    assert checkpoint.find_folder("absent", [tmp_path]) is None
    text = str(checkpoint.not_found("absent", [tmp_path]))
    assert f"no folder absent, nor {tmp_path / 'absent'}; give a folder, a file, or a hub id" in text
