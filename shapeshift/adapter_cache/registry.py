"""The registry of adapters: a folder with registry.json and a folder for each adapter, changed by write-and-rename."""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.settings import require

FILE = "registry.json"
FILES = ("adapter_config.json", "adapter_model.safetensors")
_LOCK = ".lock"
_KEEP_S = 60.0
"""Seconds that the files of a removed adapter stay, for servers that have not seen it yet."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MOST_NAMED = 20
_PIECE = 1 << 18

Stamp = tuple[int, int, int] | None


@dataclass(frozen=True)
class Entry:
    """A registered adapter: its folder within the registry, the hash of its files, and whether it stays loaded.

    stamps: size and time in ns of each of `FILES` when they were hashed; while they are the same, so is the hash.
    """

    folder: str
    sha256: str
    pinned: bool = False
    stamps: tuple[tuple[int, int], ...] = ()


def check_name(name: str, field: str = "name") -> str:
    """`name` itself; InvalidInputError where it cannot be an adapter's."""
    valid = _NAME.fullmatch(name) is not None and ".." not in name
    require(valid, field, name, "1 to 128 letters, digits, '.', '_' or '-', not '..', beginning with a letter or digit")
    return name


def unknown(name: str, known: list[str], field: str) -> NotFoundError:
    """The error for a name that nobody has registered; it lists those that somebody has."""
    listed = ", ".join(sorted(known)[:_MOST_NAMED]) or "none"
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return NotFoundError(f"{field}: no adapter {name!r}; known: {listed}{more}")


def stamp(folder: Path) -> Stamp:
    """What changes whenever registry.json does; None where there is none."""
    try:
        stat = (folder / FILE).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read(folder: Path) -> dict[str, Entry]:
    """The entries by name; none where there is no registry.json. InvalidInputError for a file that is no registry."""
    return _entries(folder, _content(folder))


def digest(folder: Path, rest: Callable[[], None] = lambda: None) -> str:
    """The hash of an adapter's two files, in hexadecimal; `rest()` is called in between.

    Raises InvalidInputError where one cannot be read.
    """
    made = hashlib.sha256()
    for name in FILES:
        try:
            of_file = hashlib.sha256()
            with (folder / name).open("rb") as stream:
                while piece := stream.read(_PIECE):
                    of_file.update(piece)
                    rest()
            made.update(f"{name}:{of_file.hexdigest()}\n".encode())
        except OSError as error:
            raise InvalidInputError("adapter", str(folder), f"must hold a readable {name} ({error.strerror})") from None
    return made.hexdigest()


def stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Size and time of change in ns of an adapter's two files; none where one is missing."""
    try:
        found = [(folder / name).stat() for name in FILES]
    except OSError:
        return ()
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in found)


def place(folder: Path, entry: Entry) -> Path:
    """The folder of a registered adapter; InvalidInputError where that would lie elsewhere than in the registry."""
    inside = Path(entry.folder).name == entry.folder and entry.folder not in ("", ".", "..")
    found = folder / entry.folder
    inside = inside and found.resolve().parent == folder.resolve()
    require(inside, "folder", entry.folder, f"the name of a folder in {folder}")
    return found


def add(folder: Path, name: str, source: Path, pinned: bool) -> Entry:
    """Copy the adapter in `source`, which has been checked, and register it; one of the same name is replaced."""
    check_name(name)
    with _changing(folder) as content:
        fresh = folder / f".{name}.{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        try:
            for file in FILES:
                shutil.copyfile(source / file, fresh / file)
            sha256 = digest(fresh)
            target = folder / f"{name}-{sha256[:12]}"
            _keep(fresh, target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        entry = Entry(target.name, sha256, pinned, stamps(target))
        _drop(content, name, keep=entry.folder)
        content["adapters"][name] = asdict(entry)
    return entry


def _keep(fresh: Path, target: Path) -> None:
    """Let `target` be what `fresh` is; of its files, those that are so already stay as they are."""
    if not target.is_dir():
        fresh.rename(target)
        return
    for file in FILES:
        # Of a file that is replaced, servers forget what they know.
        if not ((target / file).is_file() and filecmp.cmp(fresh / file, target / file, shallow=False)):
            (fresh / file).replace(target / file)


def pin(folder: Path, name: str, pinned: bool) -> None:
    """Let `name` stay loaded, or no longer. Raises NotFoundError."""
    with _changing(folder) as content:
        _require_known(content, name)
        content["adapters"][name]["pinned"] = pinned


def remove(folder: Path, name: str) -> None:
    """Register `name` no longer; its files go later. Raises NotFoundError."""
    with _changing(folder) as content:
        _require_known(content, name)
        _drop(content, name)


def _require_known(content: dict[str, Any], name: str) -> None:
    if name not in content["adapters"]:
        raise unknown(name, list(content["adapters"]), "name")


def _drop(content: dict[str, Any], name: str, keep: str = "") -> None:
    old = content["adapters"].pop(name, None)
    if old is not None and old["folder"] != keep:
        content["removed"][old["folder"]] = time.time()
    content["removed"].pop(keep, None)


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[dict[str, Any]]:
    """The content of registry.json for one process at a time, written back whole unless an error comes up."""
    with files.exclusive(folder / _LOCK):
        content = _content(folder)
        _entries(folder, content)
        yield content
        _sweep(folder, content)
        files.replace_text(folder / FILE, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _sweep(folder: Path, content: dict[str, Any]) -> None:
    """Delete what was removed a while ago."""
    for name, since in list(content["removed"].items()):
        if time.time() - since > _KEEP_S:
            shutil.rmtree(place(folder, Entry(name, "")), ignore_errors=True)
            del content["removed"][name]


def _content(folder: Path) -> dict[str, Any]:
    file = folder / FILE
    if not file.is_file():
        return {"adapters": {}, "removed": {}}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(FILE, str(file), f"JSON that can be read ({error})") from None
    valid = isinstance(content, dict) and all(isinstance(content.get(key, {}), dict) for key in ("adapters", "removed"))
    require(valid, FILE, str(file), "an object with the objects adapters and removed")
    return {"adapters": content.get("adapters", {}), "removed": content.get("removed", {})}


def _entries(folder: Path, content: dict[str, Any]) -> dict[str, Entry]:
    found = {}
    for name, stated in content["adapters"].items():
        check_name(name, f"{FILE} adapters")
        valid = (
            isinstance(stated, dict)
            and {"folder", "sha256", "pinned"} <= stated.keys() <= {"folder", "sha256", "pinned", "stamps"}
            and isinstance(stated["folder"], str)
            and isinstance(stated["sha256"], str)
            and isinstance(stated["pinned"], bool)
            and isinstance(stated.get("stamps", []), list)
        )
        require(valid, f"{FILE} {name}", stated, "an object with folder, sha256, pinned and stamps")
        kept = tuple(tuple(one) if isinstance(one, list) else one for one in stated.get("stamps", []))
        found[name] = Entry(stated["folder"], stated["sha256"], stated["pinned"], kept)
    return found
