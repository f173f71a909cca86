"""The copy of a registry at a URL in a local folder, where backends watch it as any other registry.

An entry's folder or file is named by its hash there, and is put in place whole, after its hash was checked. Then
registry.json is replaced: a reader sees the old state or the new one, never an entry that is half there.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.errors import InvalidInputError, OverloadedError, ShapeshiftError
from shapeshift.registry import FILE, Layout, Registry
from shapeshift.registry_mirror.remote import Remote
from shapeshift.settings import require

KEEP_S = 60.0
"""Seconds that the files of a removed entry stay, for servers that have not read the registry since."""
_RETRY_S = 60.0
"""Seconds until files with a wrong hash are fetched again."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OWN = re.compile(r"[0-9a-f]{64}(\.json)?")
_PLACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,254}")
_WORK = ".fetch-"
_READ = ".read"
"""The file that holds the URL of which this is a copy, written each time that the URL was read."""
_ABANDONED_S = 86_400.0

Stamps = tuple[tuple[int, int, int], ...]


class Mirror:
    """The copy in `folder` of the registry that `remote` reads. Other processes may hold a copy there, too."""

    def __init__(self, remote: Remote, layout: Layout, folder: Path) -> None:
        self._remote = remote
        self._layout = layout
        self._folder = folder
        self._whole: dict[str, Stamps] = {}
        self._wrong: dict[str, tuple[float, InvalidInputError]] = {}

    def update(self, is_wanted: Callable[[], bool] = lambda: True) -> dict[str, str]:
        """Make the copy equal to the registry. May block for long.

        Returns why entries were refused, by name and hash; such a name keeps its old entry. Where `is_wanted()` is
        false at the end nothing changes. Raises OverloadedError if the URL cannot be read, or the folder written,
        InvalidInputError for a registry.json that is none: nothing changes then.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=_WORK) as work:
                return self._update(Path(work), is_wanted)
        except OSError as error:
            raise OverloadedError(f"{self._remote.url} cannot be copied to {self._folder}: {error}") from None

    def age_s(self) -> float | None:
        """Seconds since the copy was made equal to this registry; None without a copy, or if one of its files is
        damaged. Raises OSError.
        """
        registry, stamp = Registry(self._folder, self._layout.kind), self._folder / _READ
        try:
            entries = registry.read().entries.values()
            is_ours = registry.file.exists() and stamp.read_text(encoding="utf-8") == self._remote.url
        except (OSError, InvalidInputError):
            return None
        place = self._layout.place
        if not is_ours or not all(self._is_whole(self._folder / one[place], one["sha256"]) for one in entries):
            return None
        return max(0.0, registry.now_s() - stamp.stat().st_mtime)

    def _update(self, work: Path, is_wanted: Callable[[], bool]) -> dict[str, str]:
        self._remote.fetch(FILE, work / FILE)
        wanted = Registry(work, self._layout.kind).read().entries
        known = Registry(self._folder, self._layout.kind).read().entries
        entries: dict[str, dict[str, Any]] = {}
        refused = {}
        for name, stated in wanted.items():
            try:
                entries[name] = self._entry(name, stated, work)
            except ShapeshiftError as error:
                if isinstance(error, OverloadedError):
                    # Of this object alone, or of the whole URL: then this is raised too.
                    self._remote.fetch(FILE, work / FILE)
                refused[f"{name} {stated['sha256']}"] = f"{self._remote.url}: {name} is not taken over: {error}"
                if name in known:
                    entries[name] = known[name]
        if is_wanted():
            self._install(entries)
            files.replace_text(self._folder / _READ, self._remote.url, durable=False)
        return refused

    def _entry(self, name: str, stated: Mapping[str, Any], work: Path) -> dict[str, Any]:
        """The entry as the copy has it, with its files in place. Raises ShapeshiftError, and OSError of the folder."""
        layout, sha256, source = self._layout, stated["sha256"], stated.get(self._layout.place)
        require(_SHA256.fullmatch(sha256) is not None, "sha256", sha256, "64 hexadecimal digits")
        valid = isinstance(source, str) and _PLACE.fullmatch(source) is not None
        require(valid, layout.place, source, "the name of what lies beside registry.json, not a path")
        entry = {**stated, layout.place: sha256 if layout.files else f"{sha256}.json"}
        layout.check(name, entry)
        target = self._folder / entry[layout.place]
        if not self._is_whole(target, sha256):
            self._fetch(str(source), work / target.name, sha256)
            # Another process may have put them there meanwhile, where readers have them open.
            if not self._is_whole(target, sha256):
                _put(work / target.name, target)
        return entry

    def _fetch(self, source: str, staged: Path, sha256: str) -> None:
        """Fetch an entry's files to `staged`. Raises InvalidInputError for another hash."""
        since, error = self._wrong.pop(sha256, (-math.inf, None))
        if error is not None and time.monotonic() - since < _RETRY_S:
            self._wrong[sha256] = since, error
            raise error
        if self._layout.files:
            staged.mkdir(exist_ok=True)
        for file in self._layout.files or ("",):
            self._remote.fetch(f"{source}/{file}".rstrip("/"), staged / file)
        found = self._layout.digest(staged)
        if found != sha256:
            allowed = f"the hash of its files, {found}: they are damaged or change; copy registry.json last"
            self._wrong[sha256] = time.monotonic(), InvalidInputError("sha256", sha256, allowed)
            raise self._wrong[sha256][1]
        if self._layout.files:
            files.flush_folder(staged)
        else:
            files.flush(staged)

    def _is_whole(self, target: Path, sha256: str) -> bool:
        """Whether the files are there, with their hash; files that have not changed since are not hashed again."""
        try:
            found = self._stamps(target)
            if self._whole.get(target.name) != found:
                if self._layout.digest(target) != sha256:
                    return False
                self._whole[target.name] = found
        except (OSError, InvalidInputError):
            return False
        return True

    def _stamps(self, target: Path) -> Stamps:
        found = [(target / file).stat() for file in self._layout.files or ("",)]
        return tuple((one.st_size, one.st_mtime_ns, one.st_ino) for one in found)

    def _install(self, entries: dict[str, dict[str, Any]]) -> None:
        """Name `entries` in the copy's registry.json, and delete what no entry has named for a while."""
        registry, place = Registry(self._folder, self._layout.kind), self._layout.place
        content, now_s = registry.read(), registry.now_s()
        due = any(now_s - since >= KEEP_S for since in content.removed.values())
        if registry.file.exists() and content.entries == entries and not due:
            return
        with registry.changing() as content:
            used = {fields[place] for fields in entries.values()}
            for fields in content.entries.values():
                content.removed.setdefault(str(fields[place]), now_s)
            content.entries = entries
            for name, since in list(content.removed.items()):
                if name in used or now_s - since >= KEEP_S:
                    del content.removed[name]
                if name not in used and now_s - since >= KEEP_S and _OWN.fullmatch(name):
                    _delete(self._folder / name)
        for left in self._folder.glob(f"{_WORK}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_S:
                    _delete(left)


def open_mirror(field: str, url: str, layout: Layout, folder: Path) -> Mirror:
    """The copy in `folder` of the registry at `url`, which the parameter `field` states. Raises as `Remote`."""
    return Mirror(Remote(field, url), layout, folder)


def _put(staged: Path, target: Path) -> None:
    """Rename `staged` to `target`, in the place of damaged files. Raises OSError."""
    if target.is_dir():
        shutil.rmtree(target)
    staged.rename(target)
    files.flush(target.parent)


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
