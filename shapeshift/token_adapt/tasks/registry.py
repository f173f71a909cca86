"""The task registry: registry.json in tasks_dir has the folder of each task and the hash of its files.

A folder path is absolute or relative to tasks_dir; new entries name only the registry's own copies, see `copies`. Only
`shapeshift tasks` and `make engines` change the registry.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.errors import NotFoundError
from shapeshift.registry import FILE, Content, Registry
from shapeshift.settings import require

KIND = "tasks"
COPY = re.compile(r"task-[0-9a-f]{12}")
"""The name of a folder in tasks_dir that is the registry's own copy of a task."""


@dataclass(frozen=True)
class TaskEntry:
    """A registered task: its folder, and the expected hash of its files."""

    name: str
    folder: Path
    sha256: str


def read(tasks_dir: Path) -> list[TaskEntry]:
    """The registered tasks in order of name; empty without a registry. Raises InvalidInputError for an invalid one."""
    entries = Registry(tasks_dir, KIND).read().entries
    return [_entry(tasks_dir, name, entries[name]) for name in sorted(entries)]


def add(tasks_dir: Path, entry: TaskEntry) -> None:
    """Add or replace a task."""
    with _changing(tasks_dir) as content:
        fields = {"folder": _path_of(tasks_dir, entry.folder), "sha256": entry.sha256}
        before = content.entries.get(entry.name, {})
        _retire(tasks_dir, content, before, keep=fields["folder"])
        content.entries[entry.name] = {"pinned": False, **before, **fields}


def remove(tasks_dir: Path, name: str) -> None:
    """Remove the entry of a task; only the registry's own copy is deleted, later. Raises NotFoundError."""
    with _changing(tasks_dir) as content:
        if name not in content.entries:
            registered = ", ".join(sorted(content.entries)) or "none"
            raise NotFoundError(f"name: no task {name!r} in {tasks_dir}; registered: {registered}")
        _retire(tasks_dir, content, content.entries.pop(name))


@contextlib.contextmanager
def _changing(tasks_dir: Path) -> Iterator[Content]:
    """The content of registry.json, see `Registry.changing`; copies whose entries went a while ago are deleted."""
    registry = Registry(tasks_dir, KIND)
    with registry.changing() as content:
        yield content
        registry.sweep(content, COPY.fullmatch)


def _retire(tasks_dir: Path, content: Content, fields: dict[str, Any], keep: str = "") -> None:
    """Mark the copy of an entry that is replaced or removed for deletion, unless it is the folder `keep`."""
    folder = fields.get("folder")
    is_copy = isinstance(folder, str) and COPY.fullmatch(folder) is not None
    Registry(tasks_dir, KIND).retire(content, folder if is_copy else None, keep)


def _entry(tasks_dir: Path, name: str, fields: dict[str, Any]) -> TaskEntry:
    require(isinstance(fields.get("folder"), str), f"{FILE} {name}", fields, "an object with folder and sha256")
    return TaskEntry(name, tasks_dir / fields["folder"], fields["sha256"])


def _path_of(tasks_dir: Path, folder: Path) -> str:
    """The folder path to write, relative to tasks_dir: the project may be moved, or mounted elsewhere."""
    return os.path.relpath(folder.resolve(), tasks_dir.resolve())
