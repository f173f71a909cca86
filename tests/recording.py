"""What pieces record for `shapeshift live` in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from shapeshift.serving import events
from shapeshift.serving.events import RingReader


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[RingReader]:
    """Record in a folder while the block runs; yields what reads it."""
    with mock.patch.dict(os.environ, {events.VARIABLE: str(folder)}):
        events.open_ring("m", print)
    try:
        (file,) = folder.glob(f"*{events.SUFFIX}")
        yield RingReader(file)
    finally:
        events.close_ring()
