"""Notices requests that their clients have cancelled.

`is_cancelled` asks the server's process, so a thread that computes never calls it. A call after the request's last
response was sent crashes the server (24.10): the sending thread removes the request first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Any

_PERIOD_S = 0.1
_MOST_A_PERIOD = 64


class CancellationWatch:
    """One thread that asks about every watched request in turn, at most 64 each tenth of a second."""

    def __init__(self, log: Callable[[str], None], period_s: float = _PERIOD_S) -> None:
        # In the order in which they are asked about.
        self._watched: dict[Hashable, tuple[Callable[[], bool], Callable[[], Any]]] = {}
        self._asking = threading.Lock()
        self._log = log
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellations", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, key: Hashable, is_cancelled: Callable[[], bool], then: Callable[[], Any]) -> None:
        """Call `then` once, on the watching thread, when `is_cancelled` returns True."""
        self._watched[key] = is_cancelled, then

    def remove(self, key: Hashable) -> None:
        """Stop watching a request. After this returns, `is_cancelled` is not called. Unknown keys are ignored."""
        with self._asking:
            self._watched.pop(key, None)

    def close(self, timeout_s: float = 3.0) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout_s)
        self._watched.clear()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            for key in list(islice(self._watched, _MOST_A_PERIOD)):
                self._ask(key)
            # A key holds its request, and with it Triton's sender.
            key = None

    def _ask(self, key: Hashable) -> None:
        try:
            with self._asking:
                watched = self._watched.pop(key, None)
                if watched is None:
                    return
                is_cancelled, then = watched
                if not is_cancelled():
                    # At the end: the others come first.
                    self._watched[key] = watched
                    return
            then()
        except Exception as error:  # noqa: BLE001  one request must not end the watch of the others
            self._log(f"checking for a cancellation failed: {error}")
