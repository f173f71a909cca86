"""The task registry: registry.json in tasks_dir has the folder of each task and the hash of its files.

A folder path is absolute or relative to tasks_dir. Only `shapeshift tasks` changes the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.registry import FILE, Registry
from shapeshift.settings import require

KIND = "tasks"


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
    with Registry(tasks_dir, KIND).changing() as content:
        fields = {"folder": _path_of(tasks_dir, entry.folder), "sha256": entry.sha256}
        content.entries[entry.name] = {"pinned": False, **content.entries.get(entry.name, {}), **fields}


def _entry(tasks_dir: Path, name: str, fields: dict[str, Any]) -> TaskEntry:
    require(isinstance(fields.get("folder"), str), f"{FILE} {name}", fields, "an object with folder and sha256")
    return TaskEntry(name, tasks_dir / fields["folder"], fields["sha256"])


def _path_of(tasks_dir: Path, folder: Path) -> str:
    """The folder path to write: relative if it is inside tasks_dir."""
    path, root = folder.resolve(), tasks_dir.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
