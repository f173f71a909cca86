"""The hold of a command on the nodes of a fleet: a lease, so that it ends soon after a command that was killed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def renewed(hold: Callable[[float], None], seconds: float) -> Iterator[None]:
    """Within the block, `hold(seconds)` is called again and again; after it `hold(0)`. hold: raises nothing."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(seconds / 5):
            hold(seconds)

    renewal = threading.Thread(target=renew, name="hold", daemon=True)
    hold(seconds)
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        # A renewal that waits for an actor ends with its time limit.
        renewal.join()
        hold(0.0)
