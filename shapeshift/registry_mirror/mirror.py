"""The copy of a registry at a URL in a local folder, where backends watch it as any other registry.

fsspec reads the URL: s3://, gs://, abfs://, https://, file:// and others. An entry's folder or file is named by its
hash in the copy, and is put in place whole, after its hash was checked. Then registry.json is replaced: a reader sees
the old state or the new one, never an entry that is half there.
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
from shapeshift.errors import InvalidInputError, NotFoundError, OverloadedError, ShapeshiftError, UnsupportedError
from shapeshift.registry import FILE, Layout, Registry
from shapeshift.settings import require

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s?#]+")
_PASSWORD = re.compile(r"://[^@\s]*:[^\s]*@")
# Errors of file systems quote what they asked for: user and password, and the signature of a signed request.
_SECRETS = re.compile(r"(?<=://)[^\s'\"]*@|\?[^\s'\")]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OWN = re.compile(r"[0-9a-f]{64}(\.json)?")
_PLACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,254}")
_WORK = ".fetch-"
_READ = ".read"
"""The file that holds the URL of which this is a copy, written each time that the URL was read."""
_ABANDONED_S = 86_400.0

Stamps = tuple[tuple[int, int, int], ...]


def is_url(place: str) -> bool:
    """Whether a registry is at a URL, and not in a folder."""
    return "://" in place


def require_folder(field: str, place: str) -> Path:
    """The folder `place`. Raises InvalidInputError for a URL: commands do not write there."""
    allowed = "a folder: commands do not change a registry at a URL. Change one in a folder (--dir), then copy it there"
    require(not is_url(place), field, place, f"{allowed}, registry.json last")
    return Path(place)


class Mirror:
    """The copy in `folder` of the registry at `url`. Other processes may hold a copy there, too.

    field: the parameter that states the URL; retry_s: seconds until files with a wrong hash are fetched again. Raises
    InvalidInputError for a URL that is none, or holds a password or a query, UnsupportedError without fsspec, or
    without the package of the URL's file system.
    """

    def __init__(self, field: str, url: str, layout: Layout, folder: Path, retry_s: float = 60.0) -> None:
        # A configuration is no place for a secret: it is logged, and Triton shows it to every client.
        allowed = "a URL of a folder without password and query; credentials come from the environment"
        require(bool(_URL.fullmatch(url)) and not _PASSWORD.search(url), field, _SECRETS.sub("", url), allowed)
        _require_packages(field, url)
        self._url = url.rstrip("/")
        self._layout = layout
        self._folder = folder
        self._retry_s = retry_s
        self._registry = Registry(folder, layout.kind)
        self._whole: dict[str, Stamps] = {}
        self._wrong: dict[str, tuple[float, InvalidInputError]] = {}

    def update(self, is_wanted: Callable[[], bool] = lambda: True) -> dict[str, str]:
        """Make the copy equal to the registry. May block for long.

        Returns why entries were refused, by name and hash; such a name keeps its old entry. Where `is_wanted()` is
        false at the end nothing changes. Raises OverloadedError if the URL cannot be read, or the folder written,
        NotFoundError or InvalidInputError for a registry.json that is none: nothing changes then.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=_WORK) as work:
                return self._update(Path(work), is_wanted)
        except OSError as error:
            raise OverloadedError(f"{self._url} cannot be copied to {self._folder}: {error}") from None

    def age_s(self) -> float | None:
        """Seconds since the copy was made equal to this registry; None without a copy, or if one of its files is
        damaged. Raises OSError.
        """
        stamp, place = self._folder / _READ, self._layout.place
        try:
            entries = self._registry.read().entries.values()
            is_ours = self._registry.file.exists() and stamp.read_text(encoding="utf-8") == self._url
        except (OSError, InvalidInputError):
            return None
        if not is_ours or not all(self._is_whole(self._folder / one[place], one["sha256"]) for one in entries):
            return None
        return max(0.0, self._registry.now_s() - stamp.stat().st_mtime)

    def _update(self, work: Path, is_wanted: Callable[[], bool]) -> dict[str, str]:
        self._fetch(FILE, work / FILE)
        before = self._registry.read().entries
        entries: dict[str, dict[str, Any]] = {}
        refused = {}
        for name, fields in Registry(work, self._layout.kind).read().entries.items():
            try:
                entries[name] = self._entry(name, fields, work)
            except ShapeshiftError as error:
                if isinstance(error, OverloadedError):
                    # Of this object alone, or of the whole URL: then this is raised too.
                    self._fetch(FILE, work / FILE)
                refused[f"{name} {fields['sha256']}"] = f"{self._url}: {name} is not taken over: {error}"
                if name in before:
                    entries[name] = before[name]
        if is_wanted():
            self._install(entries)
        return refused

    def _entry(self, name: str, fields: Mapping[str, Any], work: Path) -> dict[str, Any]:
        """The entry as the copy has it, with its files in place. Raises ShapeshiftError, and OSError of the folder."""
        layout, sha256, source = self._layout, fields["sha256"], fields.get(self._layout.place)
        require(_SHA256.fullmatch(sha256) is not None, "sha256", sha256, "64 hexadecimal digits")
        valid = isinstance(source, str) and _PLACE.fullmatch(source) is not None
        require(valid, layout.place, source, "the name of what lies beside registry.json, not a path")
        entry = {**fields, layout.place: sha256 if layout.files else f"{sha256}.json"}
        layout.check(name, entry)
        target = self._folder / entry[layout.place]
        if not self._is_whole(target, sha256):
            self._stage(str(source), work / target.name, sha256)
            # Another process may have put them there meanwhile, where readers have them open.
            if not self._is_whole(target, sha256):
                _put(work / target.name, target)
        return entry

    def _stage(self, source: str, staged: Path, sha256: str) -> None:
        """Fetch an entry's files to `staged`. Raises InvalidInputError for another hash."""
        since, error = self._wrong.pop(sha256, (-math.inf, None))
        if error is not None and time.monotonic() - since < self._retry_s:
            self._wrong[sha256] = since, error
            raise error
        if self._layout.files:
            staged.mkdir(exist_ok=True)
        for file in self._layout.files or ("",):
            self._fetch(f"{source}/{file}".rstrip("/"), staged / file)
        digest = self._layout.digest(staged)
        if digest != sha256:
            allowed = f"the hash of its files, {digest}: they are damaged or change; copy registry.json last"
            self._wrong[sha256] = time.monotonic(), InvalidInputError("sha256", sha256, allowed)
            raise self._wrong[sha256][1]
        if self._layout.files:
            files.flush_folder(staged)
        else:
            files.flush(staged)

    def _fetch(self, name: str, target: Path) -> None:
        """Copy the file `name`, a path below the URL, to `target`.

        Raises NotFoundError for a file that is missing, OverloadedError if the URL cannot be read now.
        """
        import fsspec

        try:
            # fsspec keeps the file system of a URL, and its connections.
            system, root = fsspec.core.url_to_fs(self._url)
            system.get_file(f"{root}/{name}", str(target))
        except FileNotFoundError:
            raise NotFoundError(f"there is no {self._url}/{name}") from None
        except Exception as error:  # noqa: BLE001  each file system has errors of its own
            what = f"{type(error).__name__}: {_SECRETS.sub('', str(error))}"
            raise OverloadedError(f"{self._url}/{name} cannot be read: {what}") from None

    def _is_whole(self, target: Path, sha256: str) -> bool:
        """Whether the files are there, with their hash; files that have not changed since are not hashed again."""
        try:
            status = [(target / file).stat() for file in self._layout.files or ("",)]
            stamps = tuple((one.st_size, one.st_mtime_ns, one.st_ino) for one in status)
            if self._whole.get(target.name) != stamps:
                if self._layout.digest(target) != sha256:
                    return False
                self._whole[target.name] = stamps
        except (OSError, InvalidInputError):
            return False
        return True

    def _install(self, entries: dict[str, dict[str, Any]]) -> None:
        """Name `entries` in the copy's registry.json, and delete what no entry has named for a while."""
        registry, place = self._registry, self._layout.place
        with registry.changing() as content:
            used = {fields[place] for fields in entries.values()}
            for gone in {str(fields[place]) for fields in content.entries.values()} - used:
                registry.retire(content, gone)
            for name in used & content.removed.keys():
                del content.removed[name]
            content.entries = entries
            registry.sweep(content, _OWN.fullmatch)
        files.replace_text(self._folder / _READ, self._url, durable=False)
        for left in self._folder.glob(f"{_WORK}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(left)


def _put(staged: Path, target: Path) -> None:
    """Rename `staged` to `target`, in the place of damaged files. Raises OSError."""
    if target.is_dir():
        shutil.rmtree(target)
    staged.rename(target)
    files.flush(target.parent)


def _require_packages(field: str, url: str) -> None:
    """Raise UnsupportedError, or InvalidInputError for a kind of URL that is not known, unless `url` can be read."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        missing = str(error) if error.name is None else f"no module {error.name}"
        raise UnsupportedError(
            f"{field}: a registry at {protocol}:// needs the packages fsspec and that of its file system, such as "
            f"s3fs, gcsfs or adlfs ({missing}); install them with pip where the server runs"
        ) from None
    except ValueError as error:
        raise InvalidInputError(field, f"{protocol}://", f"a kind of URL that fsspec knows ({error})") from None
