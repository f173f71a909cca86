"""The threads that compute masks beside the generating one: quick ones in turn, and slow ones apart from them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Protocol

SLOW_S = 0.01
"""Seconds from which a mask is slow."""


class MaskWork(Protocol):
    """The mask of an answer's next token.

    is_slow   whether the one before it was slow
    is_ended  whether nobody wants it any more
    """

    is_slow: bool
    is_ended: bool

    def compute(self) -> None:
        """Compute it. A mask thread calls this."""
        ...

    def done(self, seconds: float, error: BaseException | None) -> None:
        """It took so long, and failed with `error` if there is one. A mask thread calls this."""
        ...


class MaskThreads:
    """Computes masks, quick ones one after another on one thread, slow ones on another. Only the generating thread
    calls the methods.

    A computation cannot be interrupted. One that turns out to be slow keeps its thread to itself, and so does a slow
    one that nobody wants any more: what waits behind it is done on a new thread.
    """

    def __init__(self) -> None:
        self._workers = [_Worker(), _Worker()]

    def post(self, work: MaskWork) -> None:
        """Compute `work` soon."""
        self._workers[work.is_slow].post(work)

    def watch(self, now: float) -> None:
        """Let nothing wait behind what keeps a thread for too long. To be called while a mask is awaited."""
        for place, worker in enumerate(self._workers):
            if worker.running is None:
                continue
            work, start = worker.running
            if now - start >= SLOW_S and (not place or work.is_ended):
                self._workers[place] = worker.relieved()

    def close(self) -> None:
        """End the threads when they have done what they have."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """A thread, from its first work on. running: what it computes, and since when; None: it waits."""

    def __init__(self) -> None:
        self.running: tuple[MaskWork, float] | None = None
        self._waiting: queue.SimpleQueue[MaskWork | None] = queue.SimpleQueue()
        self._has_begun = False

    def post(self, work: MaskWork) -> None:
        self._waiting.put(work)
        if not self._has_begun:
            threading.Thread(target=self._compute_all, name="masks", daemon=True).start()
            self._has_begun = True

    def relieved(self) -> _Worker:
        """Another one with what waits; this one ends with what it computes."""
        other = _Worker()
        with contextlib.suppress(queue.Empty):
            while (work := self._waiting.get_nowait()) is not None:
                other.post(work)
        self.close()
        return other

    def close(self) -> None:
        self._waiting.put(None)

    def _compute_all(self) -> None:
        while (work := self._waiting.get()) is not None:
            start = time.monotonic()
            self.running = work, start
            error: BaseException | None = None
            try:
                work.compute()
            except BaseException as raised:  # noqa: BLE001  not even a panic in Rust may end the thread
                error = raised
            self.running = None
            work.done(time.monotonic() - start, error)
