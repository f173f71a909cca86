"""The registry of tasks: `registry.json` in tasks_dir names each task's folder and the hash of its files.

    {"format": 1, "tasks": {"digits": {"folder": "digits", "sha256": "..."}}}

A folder is named relative to tasks_dir, or absolutely. Only `shapeshift tasks` writes the registry.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shapeshift import files
from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.task_folder import read_object

FILE_NAME = "registry.json"
LOCK = ".lock"
FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """A registered task: where its folder is, and what the hash of its files must be."""

    name: str
    folder: Path
    sha256: str


def read(tasks_dir: Path) -> list[Entry]:
    """The registered tasks by name; none where there is no registry. Raises InvalidInputError for a broken one."""
    file = tasks_dir / FILE_NAME
    if not file.is_file():
        return []
    held = read_object(file)
    tasks = held.get("tasks")
    if held.get("format") != FORMAT or not isinstance(tasks, dict):
        raise InvalidInputError(FILE_NAME, str(file), f"format {FORMAT} with tasks")
    return [_entry(tasks_dir, name, tasks[name]) for name in sorted(tasks)]


def add(tasks_dir: Path, entry: Entry) -> None:
    """Add or replace a task, in one step: whoever reads meanwhile finds the registry before or after."""
    with files.exclusive(tasks_dir / LOCK):
        entries = {known.name: known for known in read(tasks_dir)} | {entry.name: entry}
        written = {
            name: {"folder": _stated(tasks_dir, known.folder), "sha256": known.sha256}
            for name, known in sorted(entries.items())
        }
        text = json.dumps({"format": FORMAT, "tasks": written}, indent=1) + "\n"
        files.replace_text(tasks_dir / FILE_NAME, text)


def _entry(tasks_dir: Path, name: str, said: object) -> Entry:
    if not isinstance(said, dict) or not all(isinstance(said.get(key), str) for key in ("folder", "sha256")):
        raise InvalidInputError(f"{FILE_NAME}: {name}", said, "an object with folder and sha256")
    return Entry(name, tasks_dir / said["folder"], said["sha256"])


def _stated(tasks_dir: Path, folder: Path) -> str:
    """The folder as the registry names it."""
    place, below = folder.resolve(), tasks_dir.resolve()
    return place.relative_to(below).as_posix() if place.is_relative_to(below) else str(place)
