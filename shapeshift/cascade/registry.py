"""The folder of candidate tables: registry.json says which candidate serves each task.

Changed only by write-and-rename, so that a server that looks at it sees the old state or the new one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shapeshift import files
from shapeshift.cascade import table as tables
from shapeshift.cascade.table import Candidate, Table
from shapeshift.engines.checkpoint import file_sha256
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.policy import Check, boolean, record, text

FILE = "registry.json"
LOCK = ".lock"


@dataclass(frozen=True)
class Entry:
    """A task: the file of its table with its hash, the candidate that serves, and whether it stays where others would
    be chosen."""

    table: str
    sha256: str
    candidate: str
    pinned: bool


@dataclass(frozen=True)
class Chosen:
    """What serves a task; pinned: also where another would meet the targets better."""

    table: Table
    candidate: Candidate
    pinned: bool


def entries(folder: Path) -> dict[str, Entry]:
    """All tasks by name; none where the folder has no registry. Raises InvalidInputError for a broken one."""
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInputError("registry", str(path), f"a JSON file ({error})") from None
    if not isinstance(data, dict):
        raise InvalidInputError("registry", str(path), "a JSON object")
    return {name: _ENTRY(f"registry.{name}", value) for name, value in data.items()}


def chosen(folder: Path, task: str) -> Chosen:
    """The table and candidate that serve `task`. Raises NotFoundError without any, InvalidInputError for a table that
    was changed by anything but the commands."""
    known = entries(folder)
    if task not in known:
        names = ", ".join(known) or "none"
        raise NotFoundError(
            f"task: no candidates for {task!r} in {folder}; known: {names}; `shapeshift cascade register`"
        )
    entry = known[task]
    path = folder / entry.table
    if not path.is_file():
        raise NotFoundError(f"candidate table {path} is missing; `shapeshift cascade register`")
    if file_sha256(path) != entry.sha256:
        raise InvalidInputError("candidate table", str(path), "the file that the registry names, unchanged")
    table = tables.read(path)
    if table.task != task:
        raise InvalidInputError("candidate table", table.task, f"a table of task {task}")
    return Chosen(table, table.candidate(entry.candidate), entry.pinned)


def put(folder: Path, made: Table, candidate: str, pinned: bool) -> None:
    """Keep the table and let `candidate` serve its task from now on."""
    if not made.task or made.task != Path(made.task).name or made.task.startswith("."):
        raise InvalidInputError("task", made.task, "a plain name")
    made.candidate(candidate)
    name = f"{made.task}.json"
    with files.exclusive(folder / LOCK):
        # A server that looks now sees a table that is not the registry's, and keeps what it has until the second write.
        files.replace_text(folder / name, made.as_json())
        entry = Entry(name, file_sha256(folder / name), candidate, pinned)
        known = {**entries(folder), made.task: entry}
        text = json.dumps({task: asdict(one) for task, one in known.items()}, indent=1) + "\n"
        files.replace_text(folder / FILE, text)


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or value != Path(value).name or value.startswith("."):
        raise InvalidInputError(name, value, "a plain file name")
    return value


_ENTRY: Check = record({"table": _name, "sha256": text, "candidate": text, "pinned": boolean}, Entry)
