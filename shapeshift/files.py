"""Files that several processes change and read: one at a time, and never half written."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(lock: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the file `lock`, which is made if need be; while somebody else has it, wait, after `waits()`.

    The hold ends with its process however that ends. Raises OSError where the file cannot be written.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def replace_text(path: Path, text: str) -> None:
    """Give `path` the content `text` in one step: who reads it sees the old or the new. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
