"""URLs of registries: which are taken, and what is said of the others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError, NotFoundError, UnsupportedError
from shapeshift.registry import Registry
from shapeshift.registry_mirror.mirror import Mirror, is_url, require_folder
from tests.registry_mirror.remote_registry import LAYOUT


def mirror(url: str, tmp_path: Path = Path("nowhere")) -> Mirror:
    return Mirror("tasks_dir", url, LAYOUT, tmp_path / "copy")


def test_a_file_url_is_read(tmp_path: Path) -> None:
    with Registry(tmp_path / "registry", LAYOUT.kind).changing():
        pass
    assert mirror(f"file://{tmp_path}/registry/", tmp_path).update() == {}
    assert Registry(tmp_path / "copy", LAYOUT.kind).file.is_file()
    with pytest.raises(NotFoundError, match=f"there is no file://{tmp_path}/absent/registry.json"):
        mirror(f"file://{tmp_path}/absent", tmp_path).update()


def test_folders_are_no_urls() -> None:
    assert is_url("s3://bucket/tasks") and not is_url("checkpoints/tasks") and not is_url("")
    assert require_folder("dir", "tasks") == Path("tasks")
    with pytest.raises(InvalidInputError, match=r"dir: got 's3://b'; a folder: .* \(--dir\), .* registry.json last"):
        require_folder("dir", "s3://b")


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/tasks",
        "s3://key:sec/secret@bucket/tasks",
        "https://host/tasks?token=secret",
        "https://host/tasks#secret",
        "://host",
        "s3:// b",
    ],
)
def test_a_url_holds_no_secret(url: str) -> None:
    with pytest.raises(InvalidInputError, match="tasks_dir: got .*without password and query") as caught:
        mirror(url)
    assert "secret" not in str(caught.value).replace("#secret", "")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent, package = next(
        (kind, package)
        for kind, package in (("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs"))
        if not importlib.util.find_spec(package)
    )
    with pytest.raises(UnsupportedError, match=rf"tasks_dir: a registry at {absent}:// .* {package}.* install them"):
        mirror(f"{absent}://bucket/tasks")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnsupportedError, match="fsspec"):
        mirror("memory://tasks")


def test_an_unknown_kind_of_url_is_named() -> None:
    with pytest.raises(InvalidInputError, match="tasks_dir: got 'moon://'; a kind of URL that fsspec knows"):
        mirror("moon://tasks")
