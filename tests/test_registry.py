"""The one format of registries, and how they change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.registry import FILE, FolderWatch, Registry

ENTRY = {"sha256": "0" * 64, "folder": "x"}


def let_a_minute_pass(folder: Path, kind: str) -> None:
    """For what was removed from the registry in `folder`."""
    with Registry(folder, kind).changing() as content:
        for name in content.removed:
            content.removed[name] -= 61.0


def test_without_a_file_there_are_no_entries(tmp_path: Path) -> None:
    assert Registry(tmp_path / "absent", "tasks").read().entries == {}


def test_a_change_is_written_whole(tmp_path: Path) -> None:
    registry = Registry(tmp_path, "tasks")
    with registry.changing() as content:
        content.entries["b"] = ENTRY
        content.entries["a"] = {**ENTRY, "pinned": True}
        content.removed["old"] = 1.0
    assert json.loads(registry.file.read_text()) == {
        "format": 2,
        "entries": {"a": {**ENTRY, "pinned": True}, "b": ENTRY},
        "removed": {"old": 1.0},
    }
    assert list(registry.read().entries) == ["a", "b"]


def test_an_error_changes_nothing(tmp_path: Path) -> None:
    registry = Registry(tmp_path, "tasks")
    with registry.changing() as content:
        content.entries["a"] = ENTRY
    before = registry.file.read_bytes()
    with pytest.raises(KeyError), registry.changing() as content:
        del content.entries["a"]
        raise KeyError
    assert registry.file.read_bytes() == before


def test_what_does_not_change_is_not_written(tmp_path: Path) -> None:
    registry = Registry(tmp_path, "tasks")
    with registry.changing():
        pass
    before = registry.file.stat()
    with registry.changing():
        pass
    assert registry.file.stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON that can be read"),
        ("[]", "a JSON object"),
        ('{"format": 3, "entries": {}}', "format 2 with the object entries, of tasks"),
        ('{"format": 2}', "format 2 with the object entries"),
        ('{"format": 2, "entries": {}, "removed": []}', "format 2 with the object entries"),
        ('{"format": 2, "entries": {"a": 1}}', "registry.json a: got 1; an object with sha256"),
        ('{"format": 2, "entries": {"a": {"sha256": 1}}}', "registry.json a: .* an object with sha256"),
        ('{"format": 2, "entries": {"a": {"sha256": "", "pinned": 1}}}', "pinned, true or false"),
    ],
)
def test_what_is_no_registry_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InvalidInputError, match=said):
        Registry(tmp_path, "tasks").read()


def test_each_change_is_reported_once(tmp_path: Path) -> None:
    file = tmp_path / "registry.json"
    watch = FolderWatch(file, tmp_path / "other")
    assert watch.has_changed() and not watch.has_changed(), "the first look is a change"
    file.write_text("1")
    assert watch.has_changed() and not watch.has_changed()
    fresh = tmp_path / "new"
    fresh.write_text("1")
    fresh.replace(file)
    assert watch.has_changed() and not watch.has_changed()
    file.unlink()
    assert watch.has_changed() and not watch.has_changed()


def test_what_no_entry_names_is_deleted_after_a_minute(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    (folder / "old-folder").mkdir(parents=True)
    for name in ("old-folder/file", "old-file", "kept", "foreign"):
        (folder / name).touch()
    (tmp_path / "outside").touch()
    registry = Registry(folder, "tasks")
    with registry.changing() as content:
        for place in ("old-folder", "old-file", "kept", "../outside", "foreign"):
            registry.retire(content, place)
        registry.retire(content, "kept", keep="kept")
        registry.retire(content, None, keep="new")
        registry.sweep(content)
    assert set(registry.read().removed) == {"old-folder", "old-file", "../outside", "foreign"}
    let_a_minute_pass(folder, "tasks")
    with registry.changing() as content:
        registry.sweep(content, lambda place: place != "foreign")
    assert set(registry.read().removed) == {"foreign"}
    assert {file.name for file in folder.iterdir()} == {"kept", "foreign", "registry.json", ".lock"}
    assert (tmp_path / "outside").exists()
