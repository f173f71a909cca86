"""One server for each run directory: waits for the end of the previous run, or cleans up after it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.triton.embedded import processes, run_record

_LOCK_TIMEOUT_S = 10.0


@contextlib.contextmanager
def exclusive_use(run_directory: Path, record_file: Path) -> Iterator[int]:
    """Hold the lock of the run directory, after cleaning up what earlier runs left.

    Yields the file descriptor of the lock; a child process that inherits it keeps the lock until it ends. Waits up
    to 10 s for a server whose owner has ended. Raises ShapeshiftError at once if its owner is running.
    """
    lock = os.open(run_directory / "server.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _acquire(lock, run_directory, record_file)
        clean_up(record_file)
        yield lock
    finally:
        os.close(lock)


def clean_up(record_file: Path) -> None:
    """End the processes of the recorded run and delete its record. The caller must hold the lock."""
    if (record := run_record.read(record_file)) is not None:
        processes.stop(record, grace_s=0.0)
    record_file.unlink(missing_ok=True)


def _acquire(lock: int, run_directory: Path, record_file: Path) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            present = run_record.read(record_file)
        if present is not None and processes.is_alive(present.owner):
            raise ShapeshiftError(
                f"a server of {run_directory} is running (started by process {present.owner.pid}); stop it,"
                " or use another build folder"
            )
        if time.monotonic() > deadline:
            raise ShapeshiftError(f"another start holds {run_directory}/server.lock; try again later")
        time.sleep(0.05)
