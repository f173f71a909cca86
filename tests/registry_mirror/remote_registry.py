"""A registry in memory, at a URL whose files a test may damage, hide, or hold back."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shapeshift.registry import FILE, Layout, Registry
from shapeshift.settings import require

PROTOCOL = "heldback"


class HeldBack(MemoryFileSystem):  # type: ignore[misc]
    """Calls `HeldBack.before`(path) before each file that it fetches."""

    protocol = PROTOCOL
    cachable = False
    before: Callable[[str], None] = staticmethod(lambda path: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix(f'{PROTOCOL}://').lstrip('/')}"

    def get_file(self, path: str, target: str, **others: Any) -> None:
        type(self).before(path)
        super().get_file(path, target, **others)


fsspec.register_implementation(PROTOCOL, HeldBack, clobber=True)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "a").read_bytes() + (folder / "b").read_bytes()).hexdigest()


def check(name: str, fields: dict[str, Any]) -> None:
    require(name != "unservable", "name", name, "another one")


LAYOUT = Layout("tasks", "folder", ("a", "b"), digest, check)
TABLES = Layout("candidates", "table", (), lambda file: hashlib.sha256(file.read_bytes()).hexdigest(), check)


def let_a_minute_pass(folder: Path, kind: str) -> None:
    """For what was removed from the registry in `folder`."""
    with Registry(folder, kind).changing() as content:
        for name in content.removed:
            content.removed[name] -= 61.0


class RemoteRegistry:
    """A registry at a URL of its own; `publish` writes what was put into it."""

    def __init__(self) -> None:
        self.root = f"/{uuid.uuid4().hex}"
        self.url = f"{PROTOCOL}://{self.root[1:]}"
        self.entries: dict[str, dict[str, Any]] = {}
        self.fetched: list[str] = []
        self._files = MemoryFileSystem()
        HeldBack.before = staticmethod(lambda path: self.fetched.append(path.removeprefix(f"{self.root}/")))

    def write(self, path: str, content: bytes) -> None:
        self._files.pipe_file(f"{self.root}/{path}", content)

    def delete(self, path: str) -> None:
        self._files.rm_file(f"{self.root}/{path}")

    def put(self, name: str, text: str, **fields: Any) -> None:
        """An entry `name` of LAYOUT, whose files hold `text`."""
        for file in LAYOUT.files:
            self.write(f"{name}/{file}", text.encode())
        sha256 = hashlib.sha256(2 * text.encode()).hexdigest()
        self.entries[name] = {"folder": name, "sha256": sha256, **fields}

    def publish(self) -> None:
        self.write(FILE, json.dumps({"format": 2, "entries": self.entries}).encode())

    def upload(self, folder: Path) -> None:
        """Write all that a local registry holds."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.write(str(file.relative_to(folder)), file.read_bytes())

    def break_off(self, error: Exception) -> None:
        """Let each file fail from now on."""

        def fail(path: str) -> None:
            raise error

        HeldBack.before = staticmethod(fail)

    def hold(self, release: threading.Event) -> None:
        """Let each file wait for `release`."""

        def wait(path: str) -> None:
            release.wait()

        HeldBack.before = staticmethod(wait)


@pytest.fixture
def remote() -> Iterator[RemoteRegistry]:
    """A registry at a URL, empty. For a conftest.py."""
    yield RemoteRegistry()
    HeldBack.before = staticmethod(lambda path: None)
