"""Which rows wait for which worker: one queue that all workers share, or one queue for each, filled by a dispatcher.

Both have the same interface, `Assignment`; `PendingRows` bounds either, and holds the rows that no worker can take. Not
thread-safe: used under the router's lock.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from shapeshift.engines.execution.request import Row, RowQueue
from shapeshift.engines.policy.packs import rows_to_take
from shapeshift.serving.bounds import Bound, SloClasses

# (bin of the worker) -> most tokens and most rows of one pack.
PackLimits = Callable[[int], tuple[int, int]]
# (bin of the worker, tokens of a row) -> what the row costs there by the profile, in ms.
RowCost = Callable[[int, int], float]
# (worker) -> what its calls in flight take by the profile, in ms.
InFlight = Callable[[str], float]


class Assignment(Protocol):
    """The rows that wait. Workers are named; a name is valid from `add` to `remove`. classes: of the rows."""

    classes: SloClasses

    def add(self, worker: str, bin_edge: int) -> bool:
        """Add a worker that takes texts of up to `bin_edge` tokens (0: any). Returns whether it can be used."""

    def remove(self, worker: str) -> list[Row]:
        """Remove a worker. Returns the rows that waited for it, to be put again."""

    def put(self, row: Row) -> str | None:
        """Add a row. Returns a worker that can take it; None if no worker can, and the row does not wait then."""

    def take(self, worker: str) -> list[Row]:
        """The rows of the worker's next call, which count as running from now on; [] if it should wait."""

    def more(self) -> str | None:
        """The best worker for the rows that any worker may take; None if no such row waits."""

    def wait_ms(self, tokens: int, in_flight: InFlight, slo_class: str | None = None) -> float:
        """The profiled time until a worker would begin a row that is put now; 0 if no worker can take it."""

    def done(self, worker: str, rows: int) -> None:
        """Record that `rows` rows of one `take` no longer run on the worker."""

    def delayed(self, worker: str, delay_ms: float) -> None:
        """Record for how long a call to the worker is on its way, or waits there for calls of other fronts."""

    def outstanding(self, worker: str) -> int:
        """Rows that wait for the worker alone, and that run on it."""

    def waiting(self) -> list[Row]:
        """All rows that wait, in no particular order."""


class SharedQueue:
    """Workers that take any length share one queue. A row is bound to a worker when one is free.

    A worker that is reached late gets a row only where the row would wait longer for the others.
    """

    def __init__(self, pack_limits: PackLimits, row_cost: RowCost, classes: SloClasses) -> None:
        self.classes = classes
        self._limits = pack_limits
        self._queue = RowQueue(lambda row: row_cost(0, row.tokens), classes)
        self._running: dict[str, int] = {}
        # What runs on each by the profile, and how late each is reached.
        self._busy_ms: dict[str, float] = {}
        self._delay_ms: dict[str, float] = {}

    def add(self, worker: str, bin_edge: int) -> bool:
        # A worker with a single bin would get texts that it must refuse.
        if bin_edge == 0:
            self._running[worker] = 0
            self._busy_ms[worker] = self._delay_ms[worker] = 0.0
        return bin_edge == 0

    def remove(self, worker: str) -> list[Row]:
        del self._running[worker], self._busy_ms[worker], self._delay_ms[worker]
        return [] if self._running else self._queue.clear()

    def put(self, row: Row) -> str | None:
        if not self._running:
            return None
        self._queue.append(row)
        return self.more()

    def take(self, worker: str) -> list[Row]:
        if not self._queue.rows:
            return []
        near = self._near()
        # A second call goes to a busy worker only when no worker is idle.
        if worker not in near or (self._running[worker] and not all(self._running[one] for one in near)):
            return []
        waiting_ms = self._queue.cost_ms
        rows = self._queue.take(_pack(len(self._running), self._limits, 0))
        self._running[worker] += len(rows)
        self._busy_ms[worker] += waiting_ms - self._queue.cost_ms
        return rows

    def more(self) -> str | None:
        if not self._queue.rows or not self._running:
            return None
        return min(self._near(), key=lambda worker: (self._running[worker], self._delay_ms[worker]))

    def _near(self) -> list[str]:
        """The workers that are not reached later than a row would wait for the first of all to be free."""
        wait_ms = (self._queue.cost_ms + sum(self._busy_ms.values())) / len(self._running)
        latest_ms = min(self._delay_ms.values()) + wait_ms
        return [worker for worker, delay_ms in self._delay_ms.items() if delay_ms <= latest_ms]

    def wait_ms(self, tokens: int, in_flight: InFlight, slo_class: str | None = None) -> float:
        busy_ms = self._queue.ms_before(slo_class) + sum(map(in_flight, self._running))
        return busy_ms / len(self._running) if self._running else 0.0

    def done(self, worker: str, rows: int) -> None:
        if rows:
            self._busy_ms[worker] *= 1.0 - rows / self._running[worker]
        self._running[worker] -= rows

    def delayed(self, worker: str, delay_ms: float) -> None:
        self._delay_ms[worker] = delay_ms

    def outstanding(self, worker: str) -> int:
        return self._running.get(worker, 0)

    def waiting(self) -> list[Row]:
        return list(self._queue.rows)


class RowDispatcher(Protocol):
    """The used part of `policy.dispatcher.Dispatcher`."""

    def add(self, level: int, instance: str, capacity: float, outstanding: int = 0) -> None: ...

    def remove(self, instance: str) -> int: ...

    def heads(self, length: int) -> list[str]: ...

    def dispatch(self, length: int) -> tuple[int, str] | None: ...

    def finish(self, instance: str) -> None: ...


class DispatchedQueues:
    """Each worker holds one bin and has its own queue; `dispatcher` chooses it when a row arrives.

    edges: of the bins, in the order of the dispatcher's levels; capacities: M_i of each.
    """

    def __init__(
        self,
        dispatcher: RowDispatcher,
        edges: Sequence[int],
        capacities: Sequence[float],
        pack_limits: PackLimits,
        row_cost: RowCost,
        classes: SloClasses,
    ) -> None:
        self.classes = classes
        self.dispatcher = dispatcher
        self._edges = list(edges)
        self._capacities = list(capacities)
        self._limits = pack_limits
        self._row_cost = row_cost
        self._queues: dict[str, RowQueue] = {}
        self._bins: dict[str, int] = {}
        self._running: dict[str, int] = {}
        # How late each worker is reached, and the rows that it could compute meanwhile.
        self._delay_ms: dict[str, float] = {}
        self._foreign: dict[str, int] = {}

    def add(self, worker: str, bin_edge: int) -> bool:
        # A worker with all engines serves the last bin. A worker of an older build, with another bin, serves the next
        # shorter one.
        level = self._level(bin_edge)
        if level < 0:
            return False
        self.dispatcher.add(level, worker, self._capacities[level])
        self._delay_ms[worker], self._foreign[worker] = 0.0, 0
        self._bins[worker] = self._edges[level] if bin_edge else 0
        edge = self._bins[worker]
        self._queues[worker] = RowQueue(lambda row: self._row_cost(edge, row.tokens), self.classes)
        self._running[worker] = 0
        return True

    def remove(self, worker: str) -> list[Row]:
        self.dispatcher.remove(worker)
        del self._bins[worker], self._running[worker], self._delay_ms[worker], self._foreign[worker]
        return self._queues.pop(worker).clear()

    def put(self, row: Row) -> str | None:
        chosen = self.dispatcher.dispatch(row.tokens)
        if chosen is None:
            return None
        self._queues[chosen[1]].append(row)
        return chosen[1]

    def take(self, worker: str) -> list[Row]:
        queue = self._queues[worker]
        if not queue.rows:
            return []
        rows = queue.take(_pack(1, self._limits, self._bins[worker]))
        self._running[worker] += len(rows)
        return rows

    def more(self) -> str | None:
        return None

    def wait_ms(self, tokens: int, in_flight: InFlight, slo_class: str | None = None) -> float:
        # Of the worker that is free first: the default dispatch chooses it.
        heads = self.dispatcher.heads(tokens)
        return min((self._queues[worker].ms_before(slo_class) + in_flight(worker) for worker in heads), default=0.0)

    def done(self, worker: str, rows: int) -> None:
        self._running[worker] -= rows
        for _ in range(rows):
            self.dispatcher.finish(worker)

    def delayed(self, worker: str, delay_ms: float) -> None:
        self._delay_ms[worker] = delay_ms
        level = self._level(self._bins[worker])
        edge = self._edges[level]
        foreign = int((delay_ms - min(self._delay_ms.values())) / self._row_cost(edge, edge))
        if foreign != self._foreign[worker]:
            # To the dispatcher, what comes before a row there is as good as rows that wait there.
            self._foreign[worker] = foreign
            self.dispatcher.remove(worker)
            self.dispatcher.add(level, worker, self._capacities[level], self.outstanding(worker) + foreign)

    def outstanding(self, worker: str) -> int:
        waiting = len(self._queues[worker].rows) if worker in self._queues else 0
        return waiting + self._running.get(worker, 0)

    def _level(self, bin_edge: int) -> int:
        """The dispatcher's level of a worker with this bin, 0: with all engines; below 0 for none."""
        return bisect_right(self._edges, bin_edge) - 1 if bin_edge else len(self._edges) - 1

    def waiting(self) -> list[Row]:
        return [row for queue in self._queues.values() for row in queue.rows]


def _pack(sharing: int, limits: PackLimits, bin_edge: int) -> Callable[[Iterable[int], int], int]:
    """How many rows the call of one of `sharing` workers with this bin takes."""
    return lambda lengths, waiting: rows_to_take(lengths, waiting, sharing, *limits(bin_edge))


class PendingRows:
    """Counts and bounds the rows of an assignment, and holds the orphans: rows that no worker can take."""

    def __init__(self, assignment: Assignment, max_rows: int) -> None:
        self.rows = 0
        self._assignment = assignment
        self._bound = Bound("queue_rows", max_rows, "rows")
        # Since when each is an orphan, on the monotonic clock.
        self._orphans: dict[Row, float] = {}

    def require_capacity(self, rows: Sequence[Row]) -> None:
        """Raise OverloadedError where `rows` do not fit. An empty queue takes any number."""
        self._bound.require_unless_empty(self.rows, len(rows))

    def put(self, rows: Sequence[Row]) -> list[str]:
        """Add the rows that still need an answer. Returns the workers that can take them."""
        takers = []
        for row in rows:
            if not row.is_open:
                continue
            self.rows += 1
            worker = self._assignment.put(row)
            if worker is None:
                self._orphans[row] = time.monotonic()
            else:
                takers.append(worker)
        return takers

    def take(self, worker: str) -> list[Row]:
        """Remove and return the rows of the worker's next call."""
        rows = self._assignment.take(worker)
        self.rows -= len(rows)
        return rows

    def add_worker(self, worker: str, bin_edge: int) -> bool:
        """Add a worker; whether it can be used."""
        return self._assignment.add(worker, bin_edge)

    def remove_worker(self, worker: str) -> list[Row]:
        """Remove a worker, and return the rows that waited for it alone; they no longer wait."""
        rows = self._assignment.remove(worker)
        self.rows -= len(rows)
        return rows

    def reassign_orphans(self) -> list[str]:
        """Offer the orphans to the workers present. Returns the workers that can take them."""
        since, self._orphans = self._orphans, {}
        self.rows -= len(since)
        takers = self.put(list(since))
        self._orphans = {row: since[row] for row in self._orphans}
        return takers

    def all(self) -> list[Row]:
        """Every row that waits."""
        return [*self._orphans, *self._assignment.waiting()] if self.rows else []

    def orphans_since(self, before: float) -> list[Row]:
        """The rows that became orphans earlier than `before` (monotonic clock)."""
        return [row for row, since in self._orphans.items() if since < before]

    def drop_finished_orphans(self) -> None:
        """Remove orphans whose requests have finished. Other rows are dropped when a worker takes them."""
        for row in [row for row in self._orphans if row.request.finished]:
            self.rows -= 1
            del self._orphans[row]

    def check_integrity(self) -> None:
        """Raise AssertionError where the count is not that of the rows."""
        rows = [*self._orphans, *self._assignment.waiting()]
        assert self.rows == len(rows), f"{self.rows} rows counted, {len(rows)} wait"
