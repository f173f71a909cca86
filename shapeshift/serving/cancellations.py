"""Notices requests that their clients have cancelled.

`is_cancelled` asks the server's process, so a thread that computes never calls it. A call after the request's last
response was sent crashes the server (24.10): the sending thread removes the request first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Any, NamedTuple

_PERIOD_S = 0.1
_MOST_A_PERIOD = 64
# Most requests are answered before they are worth a question, which takes Triton's time and the sending thread's.
_ASK_AFTER_S = 0.25


class _Watched(NamedTuple):
    since: float
    is_cancelled: Callable[[], bool]
    then: Callable[[], Any]


class CancellationWatch:
    """One thread that asks about each request that has waited `ask_after_s`, at most 64 of them a tenth of a second."""

    def __init__(
        self, log: Callable[[str], None], period_s: float = _PERIOD_S, ask_after_s: float = _ASK_AFTER_S
    ) -> None:
        # In the order in which they are asked about.
        self._watched: dict[Hashable, _Watched] = {}
        self._ask_after_s = ask_after_s
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
        self._watched[key] = _Watched(time.monotonic(), is_cancelled, then)

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
            self._ask_about(islice(self._due(), _MOST_A_PERIOD))

    def _due(self) -> Iterator[Hashable]:
        before = time.monotonic() - self._ask_after_s
        return (key for key, watched in list(self._watched.items()) if watched.since <= before)

    def _ask_about(self, keys: Iterator[Hashable]) -> None:
        # In a call of its own: a key holds its request, and with it Triton's sender, which must not outlive the answer.
        for key in keys:
            self._ask(key)

    def _ask(self, key: Hashable) -> None:
        try:
            with self._asking:
                watched = self._watched.pop(key, None)
                if watched is None:
                    return
                if not watched.is_cancelled():
                    # At the end: the others come first.
                    self._watched[key] = watched
                    return
            watched.then()
        except Exception as error:  # noqa: BLE001  one request must not end the watch of the others
            self._log(f"checking for a cancellation failed: {error}")
