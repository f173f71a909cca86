"""Registries: folders whose registry.json names what is served from them. One format for tasks, adapters, candidates.

    {"format": 2, "entries": {"digits": {"sha256": "...", "pinned": false, ...}}, "removed": {}}

Each entry has `sha256`, the hash of its files, may have `pinned`, and has fields of its kind. Only commands change a
registry, by write and rename, one process at a time; a server that reads it sees the old state or the new one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

FILE = "registry.json"
FORMAT = 2
_LOCK = ".lock"
_KEEP_S = 60.0
"""Seconds that files stay after no entry names them, for servers that have not read the registry since."""

Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass
class Content:
    """What a registry holds: the entries by name, and the time at which each file or folder of old ones was removed."""

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """How the entries of a kind of registry lie in it.

    kind    what they are, in the plural
    place   the field that names the folder or the file of an entry
    files   names of the files of such a folder; empty: `place` names a file
    digest  the hash of an entry's folder or file, which its sha256 states; raises ShapeshiftError or OSError
    check   raises ShapeshiftError for a name and fields that no server would accept
    """

    kind: str
    place: str
    files: tuple[str, ...]
    digest: Callable[[Path], str]
    check: Callable[[str, dict[str, Any]], object]


class Registry:
    """The registry in `folder`. kind: what its entries are, in the plural, for messages."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._kind = kind

    @property
    def file(self) -> Path:
        """Its registry.json, which may be missing: then there are no entries."""
        return self.folder / FILE

    def read(self) -> Content:
        """The content of the file. Raises InvalidInputError, naming the invalid entry, if it is no registry."""
        try:
            data = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Content()
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidInputError(FILE, str(self.file), f"JSON that can be read ({error})") from None
        require(isinstance(data, dict), FILE, str(self.file), "a JSON object")
        content = self._current(data) if data.get("format") == FORMAT else self._of_version_0_1(data)
        for name, entry in content.entries.items():
            valid = isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
            valid = valid and isinstance(entry.get("pinned", False), bool)
            require(valid, f"{FILE} {name}", entry, "an object with sha256, a string, and pinned, true or false")
        return content

    @contextlib.contextmanager
    def changing(self, *beside: Path) -> Iterator[Content]:
        """The content of the file, for one process at a time; written back as a whole unless an error is raised.

        beside: files that are replaced too; after an error, also of the write, they are what they were.
        """
        with files.exclusive_lock(self.folder / _LOCK), files.kept_on_error(*beside):
            content = self.read()
            yield content
            entries = dict(sorted(content.entries.items()))
            data = {"format": FORMAT, "entries": entries, "removed": content.removed}
            files.replace_text(self.file, json.dumps(data, indent=1) + "\n")

    def retire(self, content: Content, place: str | None, keep: str = "") -> None:
        """Note that no entry names the folder or file `place` any more, unless it is `keep`, which one does.

        place: None where no entry named one.
        """
        if place is not None and place != keep:
            content.removed[place] = self.now_s()
        content.removed.pop(keep, None)

    def sweep(self, content: Content, is_place: Callable[[str], object] = bool) -> None:
        """Delete the folders and files that were retired a while ago.

        is_place: whether a name in `content.removed` is that of a folder or file, which this registry owns.
        """
        now_s = self.now_s()
        for place, since in list(content.removed.items()):
            if now_s - since < _KEEP_S or not is_place(place):
                continue
            found = self.folder / place
            # What others have written there may be any path.
            if found.resolve().parent == self.folder.resolve():
                shutil.rmtree(found, ignore_errors=True) if found.is_dir() else found.unlink(missing_ok=True)
            del content.removed[place]

    def now_s(self) -> float:
        """The time of the file system that has the folder; machines that share it may have clocks that differ."""
        lock = self.folder / _LOCK
        lock.touch()
        return lock.stat().st_mtime

    def _current(self, data: dict[str, Any]) -> Content:
        entries, removed = data.get("entries"), data.get("removed", {})
        valid = isinstance(entries, dict) and _are_times(removed)
        require(valid, FILE, str(self.file), f"an object with the object entries, of {self._kind}")
        return Content(entries or {}, removed)

    def _of_version_0_1(self, data: dict[str, Any]) -> Content:
        """Version 0.1 wrote three forms: {"format": 1, KIND: entries}, {KIND: entries, "removed": ...}, and entries."""
        known = {"format", "removed", self._kind}
        entries = data.get(self._kind) if data.keys() & known else data
        removed = data.get("removed", {})
        valid = data.get("format", 1) == 1 and isinstance(entries, dict) and _are_times(removed)
        require(valid, FILE, str(self.file), f"format {FORMAT} with entries, of {self._kind}")
        warnings.warn(
            f"{self.file} has the format of version 0.1, which version 0.3 will not read; any command that changes it "
            "writes the new one",
            DeprecationWarning,
            stacklevel=3,
        )
        return Content(entries or {}, removed)


def _are_times(removed: object) -> bool:
    """Whether it is an object of numbers."""
    return isinstance(removed, dict) and all(isinstance(time, int | float) for time in removed.values())


class FolderWatch:
    """Watches `files`, any of which may be missing. Used by one thread, about once a second."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen: Stamp | None = None

    def has_changed(self) -> bool:
        """Whether a file was replaced, written, made or removed since the last call; True at the first one."""
        found = _stamp(self._files)
        changed = found != self._seen
        self._seen = found
        return changed


def _stamp(files: Sequence[Path]) -> Stamp:
    """Time, size and inode of each file; None in the place of one that is missing."""
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            status = file.stat()
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)
