"""One sidecar a run directory, by a lock that ends with its process however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shapeshift.errors import ShapeshiftError

FILE = "scheduler.lock"

_ATTEMPTS = 5
_PAUSE_S = 0.05


@contextlib.contextmanager
def sole_writer(run_directory: Path) -> Iterator[None]:
    """Hold the lock. Raises ShapeshiftError at once, naming the holder, where another sidecar has it."""
    path = run_directory / FILE
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ShapeshiftError(f"cannot open {path}: {error.strerror}") from error
    try:
        _acquire(lock, path)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(lock)


def _acquire(lock: int, path: Path) -> None:
    # A reader, or a sidecar that is just ending, holds it for a moment only.
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_PAUSE_S)
    raise ShapeshiftError(
        f"process {_name(path)} is the scheduler of {path.parent}; stop it first, or look with --dry-run"
    )


def holder(run_directory: Path) -> int | None:
    """The process that holds the lock now; None if none does."""
    path = run_directory / FILE
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        name = _name(path)
        return int(name) if name.isdecimal() else None
    except OSError:
        return None
    return None


def _name(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip() or "(just starting)"
    return "(unknown)"
