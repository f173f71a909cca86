"""One server a run directory: waits for, or cleans up after, the one before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.triton import processes, record

_WAIT_S = 10.0


@contextlib.contextmanager
def sole_use(run_directory: Path, record_file: Path) -> Iterator[int]:
    """Hold the run directory's lock, with nothing left of any earlier run.

    Yields the descriptor that holds it: a child that inherits it keeps the lock until it ends. Waits up to
    10 s for a server whose owner has gone; raises ShapeshiftError at once for one whose owner is running.
    """
    lock = os.open(run_directory / "server.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _acquire(lock, run_directory, record_file)
        clean(record_file)
        yield lock
    finally:
        os.close(lock)


def clean(record_file: Path) -> None:
    """End what the recorded run left behind and forget it. Only for the holder of the lock."""
    if (left := record.read(record_file)) is not None:
        processes.stop(left, grace_s=0.0)
    record_file.unlink(missing_ok=True)


def _acquire(lock: int, run_directory: Path, record_file: Path) -> None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            present = record.read(record_file)
        if present is not None and processes.is_alive(present.owner):
            raise ShapeshiftError(
                f"a server of {run_directory} is running (started by process {present.owner.pid}); stop it,"
                " or give this one a build folder of its own"
            )
        if time.monotonic() > deadline:
            raise ShapeshiftError(f"another start holds {run_directory}/server.lock; try again in a moment")
        time.sleep(0.05)
