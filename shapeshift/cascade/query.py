"""One client's request on its way through the levels, and its rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from shapeshift.cascade.control import Answer, Control
from shapeshift.cascade.softmax import Array


class QueryRow:
    """One text, or a pair, of a request."""

    __slots__ = ("answer", "control_ms", "engine_ms", "joined", "left", "pending", "pruned", "texts")

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = list(texts)
        # What the next level is asked, and how many words fewer that is than `texts`.
        self.left = self.texts
        self.pending = 0
        # Words that levels which have answered were spared.
        self.pruned = 0
        # The best answer so far, and what the next one is joined with.
        self.answer: Answer | None = None
        self.joined: Array | None = None
        self.engine_ms = 0.0
        self.control_ms = 0.0

    @property
    def final(self) -> Answer:
        """The answer of a row that is done."""
        assert self.answer is not None
        return self.answer


class Query:
    """Collects its rows' answers and reports once: finished(query) when all are final, or with `error`.

    level: the one that the caller asked for, None: the cascade decides; truncate: whether levels may cut its texts.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[bytes]],
        control: Control,
        finished: Callable[[Query], None],
        level: int | None = None,
        latency_ms: float | None = None,
        truncate: bool = False,
    ) -> None:
        self.rows = [QueryRow(texts) for texts in rows]
        self.control = control
        self.level = level
        self.truncate = truncate
        self.arrived = time.monotonic()
        self.deadline = None if latency_ms is None else self.arrived + latency_ms / 1e3
        self.error: Exception | None = None
        self._finished = finished
        self._left = len(self.rows)
        self._lock = threading.Lock()

    def done(self, count: int) -> None:
        """So many further rows have their final answer."""
        with self._lock:
            if not self._left or not count:
                return
            self._left -= count
            last = self._left == 0
        if last:
            self._finished(self)

    def fail(self, error: Exception) -> None:
        """End the request with `error`, unless it has ended."""
        with self._lock:
            if not self._left:
                return
            self._left = 0
            self.error = error
        self._finished(self)
