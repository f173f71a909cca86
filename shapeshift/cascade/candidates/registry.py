"""The registry of candidate tables: registry.json names the table and the serving candidate of each task.

The file of a table has its hash in its name and never changes: a reader of the old or the new registry.json finds what
it names.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.cascade.candidates import table as tables
from shapeshift.cascade.candidates.table import Candidate, CandidateTable
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.files import file_sha256
from shapeshift.policy_api import Check, boolean, record, text
from shapeshift.registry import FILE, Layout, Registry

KIND = "candidates"


@dataclass(frozen=True)
class Entry:
    """A task: the file of its table, the file's hash, the serving candidate, and whether a command has pinned it."""

    table: str
    sha256: str
    candidate: str
    pinned: bool


@dataclass(frozen=True)
class ServingCandidate:
    """The candidate that serves a task; pinned: even if another one meets the targets."""

    table: CandidateTable
    candidate: Candidate
    pinned: bool


def entries(folder: Path) -> dict[str, Entry]:
    """All tasks by name; empty where the folder has no registry. Raises InvalidInputError for a broken registry."""
    found = Registry(folder, KIND).read().entries
    return {name: _entry(name, stated) for name, stated in found.items()}


def serving(folder: Path, task: str) -> ServingCandidate:
    """The table and candidate that serve `task`.

    Raises NotFoundError where the task has none, InvalidInputError for a table that no command has written.
    """
    tasks = entries(folder)
    if task not in tasks:
        names = ", ".join(tasks) or "none"
        raise NotFoundError(
            f"task: no candidates for {task!r} in {folder}; known: {names}; run `shapeshift cascade register`"
        )
    entry = tasks[task]
    path = folder / entry.table
    if not path.is_file():
        raise NotFoundError(f"candidate table {path} is missing; run `shapeshift cascade register`")
    if file_sha256(path) != entry.sha256:
        raise InvalidInputError("candidate table", str(path), "unchanged; run `shapeshift cascade register` again")
    table = tables.read(path)
    if table.task != task:
        raise InvalidInputError("candidate table", table.task, f"a table of task {task}")
    return ServingCandidate(table, table.candidate(entry.candidate), entry.pinned)


def put(folder: Path, table: CandidateTable, candidate: str, pinned: bool) -> Path:
    """Write the table, and let `candidate` serve its task from now on. After an error all is as it was.

    Returns the file of the table.
    """
    if not table.task or table.task != Path(table.task).name or table.task.startswith("."):
        raise InvalidInputError("task", table.task, "a plain name")
    table.candidate(candidate)
    written = table.as_json()
    sha256 = hashlib.sha256(written.encode()).hexdigest()
    file = folder / f"{table.task}-{sha256[:12]}.json"
    registry = Registry(folder, KIND)
    with registry.changing(file) as content:
        files.replace_text(file, written)
        before = content.entries.get(table.task, {}).get("table")
        registry.retire(content, before if isinstance(before, str) else None, keep=file.name)
        content.entries[table.task] = asdict(Entry(file.name, sha256, candidate, pinned))
        registry.sweep(content)
    return file


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or value != Path(value).name or value.startswith("."):
        raise InvalidInputError(name, value, "a plain file name")
    return value


def _entry(name: str, stated: dict[str, Any]) -> Entry:
    entry: Entry = _ENTRY(f"{FILE} {name}", {"pinned": False, **stated})
    return entry


LAYOUT = Layout(KIND, "table", (), file_sha256, _entry)
_ENTRY: Check = record({"table": _name, "sha256": text, "candidate": text, "pinned": boolean}, Entry)
