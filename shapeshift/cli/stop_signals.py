"""The signals that tell a command to stop, as an event or an exception."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Within the block, an event that SIGINT, SIGTERM and SIGHUP set. Further signals do not interrupt the stop.

    Only for the main thread. The handlers take no lock: a handler runs between any two instructions of the main
    thread, also of another handler, and the lock of an event that the main thread holds then would never be released.
    """
    stop = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = threading.Thread(target=_watch, args=(reading, stop), name="signals", daemon=True)
    watcher.start()
    # Python writes the number of each signal with a handler to this descriptor.
    descriptor_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handlers_before = [signal.signal(number, lambda *_: None) for number in _SIGNALS]
    try:
        yield stop
    finally:
        for number, handler in zip(_SIGNALS, handlers_before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor_before)
        os.close(writing)
        watcher.join()
        os.close(reading)


@contextlib.contextmanager
def stop_on_sigterm(command: str) -> Iterator[None]:
    """Let SIGTERM end a change as an exception does, so that what is half done is removed."""

    def stop(*_: object) -> None:
        sys.stderr.write(f"shapeshift {command}: stopped by SIGTERM\n")
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(reading: int, stop: threading.Event) -> None:
    while numbers := os.read(reading, 64):
        if any(number in _SIGNALS for number in numbers):
            stop.set()
