"""Registries: folders whose registry.json names what is served from them. One format for tasks, adapters, candidates.

    {"format": 2, "entries": {"digits": {"sha256": "...", "pinned": false, ...}}, "removed": {}}

Each entry has `sha256`, the hash of its files, may have `pinned`, and has fields of its kind. Only commands change a
registry, by write and rename, one process at a time; a server that reads it sees the old state or the new one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
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


def require_folder(field: str, place: str) -> str:
    """`place`, of the setting or option `field`. Raises InvalidInputError for a URL."""
    require("://" not in place, field, place, "a folder, such as a bucket that each machine has mounted; not a URL")
    return place


@dataclass
class Content:
    """What a registry holds: the entries by name, and the time at which each file or folder of old ones was removed."""

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: dict[str, float] = field(default_factory=dict)


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
        entries, removed = data.get("entries"), data.get("removed", {})
        valid = data.get("format") == FORMAT and isinstance(entries, dict) and isinstance(removed, dict)
        valid = valid and all(isinstance(time, int | float) for time in removed.values())
        require(valid, FILE, str(self.file), f"format {FORMAT} with the object entries, of {self._kind}")
        for name, entry in entries.items():
            valid = isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
            valid = valid and isinstance(entry.get("pinned", False), bool)
            require(valid, f"{FILE} {name}", entry, "an object with sha256, a string, and pinned, true or false")
        return Content(entries, removed)

    @contextlib.contextmanager
    def changing(self, *beside: Path) -> Iterator[Content]:
        """The content of the file, for one process at a time; written back as a whole if it changes, and no error is
        raised.

        beside: files that are replaced too; after an error, also of the write, they are what they were.
        """
        with files.exclusive_lock(self.folder / _LOCK), files.kept_on_error(*beside):
            before, content = self.read(), self.read()
            yield content
            if content == before and self.file.exists():
                return
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
            path = self.folder / place
            # What others have written there may be any path.
            if path.resolve().parent == self.folder.resolve():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            del content.removed[place]

    def now_s(self) -> float:
        """The time of the file system that has the folder; machines that share it may have clocks that differ."""
        lock = self.folder / _LOCK
        lock.touch()
        return lock.stat().st_mtime


class FolderWatch:
    """Watches `files`, any of which may be missing. Used by one thread, about once a second."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen: tuple[tuple[int, int, int] | None, ...] | None = None

    def has_changed(self) -> bool:
        """Whether a file was replaced, written, made or removed since the last call; True at the first one."""
        before, self._seen = self._seen, tuple(map(_stamp, self._files))
        return self._seen != before


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Time, size and inode; None for a file that is missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
