"""A request to the text engines, its rows, and the queue in which rows wait."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from shapeshift.engines.interfaces import TOKEN_OUTPUTS, Array, Ids
from shapeshift.errors import OverloadedError
from shapeshift.serving.bounds import Bound, ClassQueue, SloClasses, TimeBound, unloading
from shapeshift.serving.front import RequestLine, Trace


class Row:
    """One text of a request."""

    __slots__ = ("done", "failures", "ids", "index", "request", "size", "timeouts")

    def __init__(self, request: TextRequest, index: int, ids: Ids) -> None:
        self.request = request
        self.index = index
        self.ids = ids
        # The number of workers that failed on this row.
        self.failures = 0
        # The number of workers that timed out on this row.
        self.timeouts = 0
        self.done = False
        # Tokens of the engine that computed it; 0: of any size.
        self.size = 0

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def slo_class(self) -> str | None:
        return self.request.slo_class

    @property
    def arrived(self) -> float:
        return self.request.arrived

    @property
    def is_open(self) -> bool:
        """Whether it still needs an answer."""
        return not (self.done or self.request.finished)


class TextRequest:
    """Collects the outputs of its rows. It finishes when the last row is done or the first row fails.

    on_finished(request) is called exactly once, on the thread that finished it. By then either `error` is set or
    `outputs`: [rows, ...] by name, or [rows, longest, ...] with zeros beyond a row's end for one entry per token.
    """

    def __init__(
        self,
        texts: Sequence[Ids],
        on_finished: Callable[[TextRequest], None],
        latency_ms: float | None = None,
        slo_class: str | None = None,
    ) -> None:
        self.slo_class = slo_class
        self.rows = [Row(self, index, ids) for index, ids in enumerate(texts)]
        self.arrived = time.monotonic()
        self.outputs: dict[str, Array] = {}
        self.engine_ms = np.zeros(len(self.rows), np.float32)
        self.error: Exception | None = None
        self.latency_ms = latency_ms
        self.trace: Trace | None = None
        # Of all its rows: see `EngineExecutor.adapted`.
        self.adapter: Any = None
        # When it was taken: how long its answer would take.
        self.predicted_ms: float | None = None
        self._deadline = None if latency_ms is None else self.arrived + latency_ms / 1e3
        self._on_finished = on_finished
        self._on_answered: Callable[[float], None] | None = None
        self._longest = max(map(len, texts), default=0)
        self._remaining = len(self.rows)
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether it has succeeded or failed. Its waiting rows need not be computed."""
        return self._remaining == 0

    def require_in_time(self, predicted_ms: float, bound: TimeBound) -> None:
        """Raise OverloadedError where an answer after `predicted_ms` is too late for its deadline or for `bound`.

        Else `bound` learns how long the answer took.
        """
        bound.require(predicted_ms, self.latency_ms)
        self.predicted_ms = predicted_ms
        self._on_answered = partial(bound.observe, predicted_ms)

    def fail_if_late(self) -> None:
        """Fail with OverloadedError if the deadline `latency_ms` has expired."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.fail(OverloadedError("latency_ms ran out while the request waited; retry later or elsewhere"))

    def should_run(self) -> bool:
        """Whether to compute its rows. Fails the request first if its deadline has expired."""
        self.fail_if_late()
        return not self.finished

    def complete(self, row: Row, values: dict[str, Array], engine_ms: float = 0.0, size: int = 0) -> None:
        """Record the outputs of one row, and the duration and size of the engine that computed it.

        A second result of a row is ignored.
        """
        with self._lock:
            if self.finished or row.done:
                return
            row.done, row.size = True, size
            self.engine_ms[row.index] = engine_ms
            for name, value in values.items():
                if name in TOKEN_OUTPUTS:
                    # In a pack with longer texts the values are padded beyond the longest row of this request.
                    self.outputs.setdefault(
                        name, np.zeros((len(self.rows), self._longest, *value.shape[1:]), value.dtype)
                    )
                    self.outputs[name][row.index, : row.tokens] = value[: row.tokens]
                    continue
                if name not in self.outputs:
                    self.outputs[name] = np.empty((len(self.rows), *value.shape), value.dtype)
                self.outputs[name][row.index] = value
            self._remaining -= 1
            last = self._remaining == 0
        if last:
            if self._on_answered is not None:
                self._on_answered((time.monotonic() - self.arrived) * 1e3)
            self._on_finished(self)

    def fail(self, error: Exception) -> None:
        """Fail the request with `error`, unless it has finished."""
        with self._lock:
            if self.finished:
                return
            self._remaining = 0
            self.error = error
        self._on_finished(self)


def trace_call(rows: Sequence[Row], began: float, facts: RequestLine) -> None:
    """Add the engine call that has just computed these rows to the traces of their requests.

    began: monotonic, in seconds; facts: what the spans say beside the wait of the request until then.
    """
    ended = time.monotonic()
    for request in dict.fromkeys(row.request for row in rows if row.request.trace is not None):
        assert request.trace is not None
        pack = {"texts": len(rows), "tokens": sum(row.tokens for row in rows)}
        waited = {"waited_ms": (began - request.arrived) * 1e3}
        request.trace.span("engine call", began, ended, {**facts, **pack, **waited})


class RowQueue:
    """Rows that wait, in the order in which they go, and what they cost.

    cost_ms: of a row. classes: counts what its rows do; see `ClassQueue`. Not thread-safe.
    """

    def __init__(self, cost_ms: Callable[[Row], float], classes: SloClasses) -> None:
        self.rows: ClassQueue[Row] = ClassQueue(classes)
        self._classes = classes
        self._cost_ms = cost_ms
        # By the rank of the class.
        self._costs_ms = [0.0] * len(classes.names)

    @property
    def cost_ms(self) -> float:
        """What all rows cost together."""
        return sum(self._costs_ms)

    def ms_before(self, slo_class: str | None) -> float:
        """What those cost that go before a row of this class, as far as classes order them."""
        return sum(self._costs_ms[: self._classes.rank(slo_class) + 1])

    def append(self, row: Row) -> None:
        """One more row waits."""
        self.rows.add(row)
        self._costs_ms[self._classes.rank(row.slo_class)] += self._cost_ms(row)

    def take(self, decide: Callable[[Iterable[int], int], int]) -> list[Row]:
        """Remove as many from the head as `decide` returns.

        decide(lengths, waiting): the waiting rows' tokens in order and their number; at least 1. Of one row it is not
        asked.
        """
        waiting = len(self.rows)
        taken = self.rows.take(decide((row.tokens for row in self.rows), waiting) if waiting > 1 else waiting)
        for row in taken:
            self._costs_ms[self._classes.rank(row.slo_class)] -= self._cost_ms(row)
        # An empty queue costs nothing, whatever the rounding of the sums.
        if not self.rows:
            self._costs_ms = [0.0] * len(self._costs_ms)
        return taken

    def clear(self) -> list[Row]:
        """Remove all rows."""
        self._costs_ms = [0.0] * len(self._costs_ms)
        return self.rows.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError where the cost is not that of the rows."""
        assert math.isclose(self.cost_ms, sum(map(self._cost_ms, self.rows)), abs_tol=1e-6), "cost is off"


class BoundedQueue:
    """Rows that wait, with a bound on their number; producers never wait, consumers do.

    cost_ms: of a row, by the profile. classes: see `RowQueue`.
    """

    def __init__(
        self,
        max_rows: int,
        cost_ms: Callable[[Row], float] = lambda row: 0.0,
        classes: SloClasses | None = None,
    ) -> None:
        self.classes = classes or SloClasses()
        self._bound = Bound("queue_rows", max_rows, "rows")
        self._waiting = RowQueue(cost_ms, self.classes)
        self._closed = False
        self._ready = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting.rows)

    @property
    def waiting_ms(self) -> float:
        """What the waiting rows cost together."""
        return self._waiting.cost_ms

    def ms_before(self, slo_class: str | None) -> float:
        """See `RowQueue`."""
        return self._waiting.ms_before(slo_class)

    def put(self, rows: Sequence[Row]) -> None:
        """Append all of `rows` or none; OverloadedError naming the limit where they do not fit.

        An empty queue takes any request, however large, so that no limit makes one impossible.
        """
        with self._ready:
            if self._closed:
                raise unloading()
            self._bound.require_unless_empty(len(self), len(rows))
            for row in rows:
                self._waiting.append(row)
            self._ready.notify(len(rows))

    def take(self, decide: Callable[[Iterable[int], int], int]) -> list[Row]:
        """Wait for rows, then take as `RowQueue` does; [] once closed."""
        with self._ready:
            while not len(self) and not self._closed:
                self._ready.wait()
            return self._waiting.take(decide) if len(self) else []

    def waiting(self) -> list[Row]:
        """The rows that wait now, in order."""
        with self._ready:
            return list(self._waiting.rows)

    def close(self) -> list[Row]:
        """Refuse further rows, wake every consumer, and return the rows that still waited."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
            return self._waiting.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError where the cost is not that of the rows."""
        with self._ready:
            self._waiting.check_integrity()
