"""A request to the text engines, its rows, and the queue in which rows wait."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from shapeshift.engines.interfaces import TOKEN_OUTPUTS, Array, Ids
from shapeshift.errors import OverloadedError
from shapeshift.serving.bounds import OTHERS, Bound, ClassOrder, TimeBound, unloading

_ORDERED_ROWS = 128


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


class BoundedQueue:
    """Rows that wait, with a bound on their number; producers never wait, consumers do.

    cost_ms: of a row, by the profile. classes: see `ClassOrder`, which orders the rows at the head.
    """

    def __init__(
        self,
        max_rows: int,
        cost_ms: Callable[[Row], float] = lambda row: 0.0,
        classes: Sequence[str] = (OTHERS,),
    ) -> None:
        self.order: ClassOrder[Row] = ClassOrder(classes)
        # Waiting rows whose request names a class.
        self._with_class = 0
        self._bound = Bound("queue_rows", max_rows, "rows")
        self._waiting: deque[Row] = deque()
        self._cost_ms = cost_ms
        self._waiting_ms = 0.0
        self._closed = False
        self._ready = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_ms(self) -> float:
        """What the waiting rows cost together."""
        return self._waiting_ms

    def put(self, rows: Sequence[Row]) -> None:
        """Append all of `rows` or none; OverloadedError naming the limit where they do not fit.

        An empty queue takes any request, however large, so that no limit makes one impossible.
        """
        with self._ready:
            if self._closed:
                raise unloading()
            self._bound.require_unless_empty(len(self._waiting), len(rows))
            self._waiting.extend(rows)
            self._waiting_ms += sum(map(self._cost_ms, rows))
            self._with_class += sum(row.slo_class is not None for row in rows)
            self._ready.notify(len(rows))

    def take(self, decide: Callable[[Iterable[int], int], int]) -> list[Row]:
        """Wait for rows, then remove as many from the head as `decide` returns; [] once closed.

        decide(lengths, waiting): the waiting rows' tokens in order and their number; at least 1.
        """
        with self._ready:
            while not self._waiting and not self._closed:
                self._ready.wait()
            if not self._waiting:
                return []
            taken = (
                self._take_by_class(decide) if self._with_class or self.order.remembers else self._take_in_order(decide)
            )
            # An empty queue costs nothing, whatever the rounding of the sums.
            self._waiting_ms = self._waiting_ms - sum(map(self._cost_ms, taken)) if self._waiting else 0.0
            return taken

    def _take_in_order(self, decide: Callable[[Iterable[int], int], int]) -> list[Row]:
        count = decide((row.tokens for row in self._waiting), len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def _take_by_class(self, decide: Callable[[Iterable[int], int], int]) -> list[Row]:
        # Of a long queue only the head is put in order: that takes time, and the engine waits.
        head = list(itertools.islice(self._waiting, _ORDERED_ROWS))
        rest = itertools.islice(self._waiting, len(head), None)
        ordered = [*self.order.upcoming(head, len(head)), *rest]
        count = decide((row.tokens for row in ordered), len(ordered))
        taken = ordered[:count]
        self.order.pick(head, min(count, len(head)), lambda row: True)
        gone = {*taken}
        self._waiting = deque(row for row in self._waiting if row not in gone)
        self._with_class -= sum(row.slo_class is not None for row in taken)
        return taken

    def waiting(self) -> list[Row]:
        """The rows that wait now, in order."""
        with self._ready:
            return list(self._waiting)

    def close(self) -> list[Row]:
        """Refuse further rows, wake every consumer, and return the rows that still waited."""
        with self._ready:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._waiting_ms, self._with_class = 0.0, 0
            self._ready.notify_all()
        return left

    def check_integrity(self) -> None:
        """Raise AssertionError where the cost is not that of the rows."""
        with self._ready:
            assert self._with_class == sum(row.slo_class is not None for row in self._waiting), "classes are off"
            assert math.isclose(self._waiting_ms, sum(map(self._cost_ms, self._waiting)), abs_tol=1e-6), "cost is off"
