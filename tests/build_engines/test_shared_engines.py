"""A store of engines: one machine of a kind builds them, the next one copies them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.build_engines import model_folder
from shapeshift.build_engines.store import shared_engines
from shapeshift.build_engines.text import plan as text_plan
from shapeshift.cli.main import main
from shapeshift.engines import manifest
from shapeshift.triton import model_config

Build = Callable[..., str]


@pytest.fixture
def build(
    tmp_path: Path, add_front: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Build:
    """A function that builds the front `encode` on a machine of this hardware; returns what is printed of it."""

    def run(machine: str, hardware: str = "Xeon", **parameters: object) -> str:
        monkeypatch.setattr(text_plan, "with_cpu", lambda device: hardware)
        root = tmp_path / machine
        add_front(root / "model_repository", "encode", **{"bins": "16,64", **parameters})
        monkeypatch.chdir(root)
        assert main(["engines", "--brief", "--store", str(tmp_path / "store")]) == 0
        return capsys.readouterr().out

    return run


def stored(root: Path) -> list[Path]:
    return sorted((root / "store" / "encode").iterdir())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_next_machine_of_the_kind_copies_what_the_first_has_built(build: Build, tmp_path: Path) -> None:
    assert "encode: built; " in build("a")
    (folder,) = stored(tmp_path)
    assert f"encode: copied from {folder}; " in build("b")
    first, second = (files(tmp_path / machine / "build" / "engines" / "encode") for machine in "ab")
    assert first == second and "manifest.json" in first
    assert "encode: up to date; " in build("b")
    # Neither needs the store to serve; what is there fills a new one.
    shutil.rmtree(tmp_path / "store")
    assert "encode: up to date; " in build("a")
    assert stored(tmp_path) == [folder] and "encode: copied from " in build("c")


def test_another_kind_of_machine_or_other_settings_build_their_own(build: Build, tmp_path: Path) -> None:
    build("a")
    assert "encode: built; " in build("b", hardware="EPYC")
    assert "encode: built; " in build("c", bins="32,64")
    assert len(stored(tmp_path)) == 3
    assert "encode: copied from " in build("d", hardware="EPYC")


@pytest.mark.parametrize("fault", ["changed", "missing", "no manifest"])
def test_a_damaged_store_is_told_and_mended(build: Build, tmp_path: Path, fault: str) -> None:
    build("a")
    (folder,) = stored(tmp_path)
    whole = files(folder)
    if fault == "changed":
        (folder / "tokenizer.json").write_bytes(b"{" + (folder / "tokenizer.json").read_bytes()[1:-1] + b" ")
    else:
        (folder / ("tokenizer.json" if fault == "missing" else "manifest.json")).unlink()
    assert f"encode: built ({folder} was not used: its files are not those of its manifest); " in build("b")
    assert files(folder).keys() == whole.keys()
    assert "encode: copied from " in build("c")


def test_a_store_that_cannot_be_written_stops_no_build(build: Build, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    assert f"encode: built (not stored in {tmp_path / 'store' / 'encode'}" in build("a")


def test_of_two_machines_that_build_at_once_one_fills_the_store(tmp_path: Path) -> None:
    target, shared = tmp_path / "target", tmp_path / "store" / "encode" / "key"

    def make() -> None:
        target.mkdir()
        (target / "engine").write_text("made here")
        shared.mkdir(parents=True)
        (shared / "engine").write_text("made there, meanwhile")

    made = shared_engines.ensure(target, shared, lambda folder: (folder / "engine").is_file(), make, lambda: None)
    assert made == "built" and (shared / "engine").read_text() == "made there, meanwhile"
    assert [path.name for path in shared.parent.iterdir()] == ["key"]


def test_a_build_that_is_stopped_leaves_a_model_that_loads(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while the model's folder is written, the old one stays; while the store is filled, the new one stands."""
    build("a")
    front, engines = (tmp_path / "a" / "build" / name / "encode" for name in ("repository", "engines"))
    before = files(front)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model_folder.Path, "write_text", stop)
        with pytest.raises(KeyboardInterrupt):
            model_folder.write_folder(front, {"config.pbtxt": "other"})
    assert files(front) == before and [path.name for path in front.parent.iterdir()] == ["encode"]
    with monkeypatch.context() as patch:
        patch.setattr(shared_engines, "_stored", stop)
        with pytest.raises(AssertionError, match="130 == 0"):
            build("a", bins="16,32,64")
    stated = model_config.parameters(model_config.read(front / "config.pbtxt"))
    assert stated["manifest_sha256"] == manifest.sha256(engines)
