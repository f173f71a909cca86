"""Files that several processes read and write: one writer at a time, and no reader sees a partial file.

What takes another's place is on the disk before it does: also after a crash of the machine, a name is that of a whole
file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HASHES = "hashes.json"
"""The file of the build folder that remembers the hashes of weights and engines, beside the folders of engines and of
compiled kernels."""
_SETTLED_S = 2.0
_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}\.draft")
# Longer than anything takes to be written.
_ABANDONED_S = 86_400.0
# Of renameat2: a path is seen from the working directory.
_HERE, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def exclusive_lock(lock: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file `lock`, which is created if missing. `on_wait()` is called if another process holds it.

    The kernel releases the lock when the process exits. Raises OSError if the file cannot be written.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """The path of a file or folder beside `path` that no thread, process or machine uses but the caller.

    What lies there at the end is removed, and what killed processes have left in the folder is after a day.
    """
    remove_drafts(path.parent, _ABANDONED_S)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.draft")
    try:
        yield draft
    finally:
        _remove(draft)


def remove_drafts(folder: Path, min_age_s: float = 0.0) -> None:
    """Remove the drafts in `folder` that are as old; without an age all: nobody else may write there."""
    for draft in folder.glob(".*.draft"):
        with contextlib.suppress(OSError):
            if _DRAFT.fullmatch(draft.name) and time.time() - draft.stat().st_mtime >= min_age_s:
                _remove(draft)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace the content of `path` by `text` atomically: a reader sees the old or the new text. Raises OSError.

    durable: false for a file that may be lost when the machine crashes; it does not wait for the disk.
    """
    with draft_of(path) as draft:
        draft.write_text(text, encoding="utf-8")
        if durable:
            flush(draft)
        draft.replace(path)
    if durable:
        flush(path.parent)


def replace_private(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically by a file that only its owner can read. Raises OSError.

    Folders that are missing are made, likewise for the owner only. It does not wait for the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with draft_of(path) as draft:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as stream:
            stream.write(content)
        draft.replace(path)


@contextlib.contextmanager
def replace_folder(target: Path, within: Path | None = None) -> Iterator[Path]:
    """An empty folder in `within`, else beside `target`, which takes its place at the end.

    Whoever may list it may then read its files, as a server of another user than the one that builds must.
    After an error `target` is unchanged. A kill or a crash of the machine in between leaves the old folder or the new
    one, and on a file system that cannot exchange two folders for an instant none.
    """
    work = (within or target.parent) / f".{target.name}.building"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield work
        for path in work.rglob("*"):
            if path.is_file() and not path.is_symlink():
                let_read(path)
        flush_folder(work)
        if target.is_dir() and not _exchange(work, target):
            retired = work.with_name(f"{work.name}.old")
            shutil.rmtree(retired, ignore_errors=True)
            target.rename(retired)
            work.rename(target)
            shutil.rmtree(retired, ignore_errors=True)
        elif not target.is_dir():
            work.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def let_read(file: Path) -> None:
    """Let those who may list the folder of a file read it: safetensors writes files for their owner only."""
    missing = file.parent.stat().st_mode & ~file.stat().st_mode & 0o444
    # Some file systems refuse every change.
    if missing:
        file.chmod(file.stat().st_mode | missing)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step (renameat2, Linux 3.15); whether that was possible."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    return int(libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE)) == 0


@contextlib.contextmanager
def kept_on_error(*paths: Path) -> Iterator[None]:
    """While `paths` are replaced: after an error each has its old content again, or is missing as before.

    That needs no space on the disk. Raises OSError, before anything is replaced, if there is none for the copies.
    """
    with contextlib.ExitStack() as stack:
        copies = {path: stack.enter_context(draft_of(path)) for path in paths}
        for path, copy in copies.items():
            if path.is_file():
                shutil.copy2(path, copy)
        try:
            yield
        except BaseException:
            for path, copy in copies.items():
                if copy.is_file():
                    copy.replace(path)
                else:
                    path.unlink(missing_ok=True)
            raise


def is_exposed(path: Path) -> bool:
    """Whether the mode of a key's file lets other users read it. Raises OSError.

    A file of a volume has the mode that whoever mounts it gives to all its files, and nobody can change it: one of a
    Secret of Kubernetes, which has the link `..data` beside it, or one that is mounted read-only.
    """
    if (path.parent / "..data").is_symlink() or os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    return bool(path.stat().st_mode & 0o077)


def flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """`flush` all that a folder holds, and the folder itself."""
    for path in folder.rglob("*"):
        if path.is_dir() or path.is_file():
            flush(path)
    flush(folder)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class RememberedHashes:
    """SHA-256 of files, kept in the file `store` by path, size, modification time and inode; None: kept nowhere.

    A file that was changed a moment ago is hashed again the next time: a second change might leave its time as it is.
    What a moment ago is, this machine's clock and that of the file system of `store` both say.
    """

    def __init__(self, store: Path | None) -> None:
        self._store = store
        self._entries: dict[str, list[object]] = {}
        if store is not None:
            with contextlib.suppress(OSError, ValueError):
                stored = json.loads(store.read_text(encoding="utf-8"))
                self._entries = stored if isinstance(stored, dict) else {}

    def sha256(self, path: Path) -> str:
        """The hash of the file at `path`. Raises OSError."""
        key, stat = str(path.resolve()), path.stat()
        stamp: list[object] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = self._entries.get(key)
        if isinstance(entry, list) and entry[:-1] == stamp and isinstance(entry[-1], str):
            return entry[-1]
        digest = file_sha256(path)
        # A server may lack the right to write; it then hashes each time.
        with contextlib.suppress(OSError):
            self._remember(key, stamp, stat.st_mtime, digest)
        return digest

    def _remember(self, key: str, stamp: list[object], changed_at: float, digest: str) -> None:
        if self._store is None or time.time() - changed_at <= _SETTLED_S:
            return
        # On a file system of several machines, times are those of another one.
        if _time_of_files(self._store.parent) - changed_at <= _SETTLED_S:
            return
        self._entries[key] = [*stamp, digest]
        replace_text(self._store, json.dumps(self._entries), durable=False)


def _time_of_files(folder: Path) -> float:
    """The modification time that a file in `folder` gets now, in seconds. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime
