"""Which rows wait for which worker: one queue that all workers share, or one queue for each, filled by a dispatcher.

Both have the same interface. Not thread-safe: used under the router's lock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shapeshift.engines.execution.request import Row
from shapeshift.engines.policy.pack_size import rows_to_take

# (bin of the worker) -> most tokens and most rows of one pack.
PackLimits = Callable[[int], tuple[int, int]]


class Assignment(Protocol):
    """The rows that wait. Workers are named; a name is valid from `add` to `remove`."""

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

    def done(self, worker: str, rows: int) -> None:
        """Record that `rows` rows of one `take` no longer run on the worker."""

    def outstanding(self, worker: str) -> int:
        """Rows that wait for the worker alone, and that run on it."""

    def waiting(self) -> list[Row]:
        """All rows that wait, in no particular order."""


class SharedQueue:
    """Workers that take any length share one queue. A row is bound to a worker when one is free."""

    def __init__(self, pack_limits: PackLimits) -> None:
        self._limits = pack_limits
        self._rows: deque[Row] = deque()
        self._running: dict[str, int] = {}

    def add(self, worker: str, bin_edge: int) -> bool:
        # A worker with a single bin would get texts that it must refuse.
        if bin_edge == 0:
            self._running[worker] = 0
        return bin_edge == 0

    def remove(self, worker: str) -> list[Row]:
        del self._running[worker]
        if self._running:
            return []
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def put(self, row: Row) -> str | None:
        if not self._running:
            return None
        self._rows.append(row)
        return self.more()

    def take(self, worker: str) -> list[Row]:
        # A second call goes to a busy worker only when no worker is idle.
        if not self._rows or (self._running[worker] and not all(self._running.values())):
            return []
        tokens, rows = self._limits(0)
        waiting = len(self._rows)
        count = rows_to_take((row.tokens for row in self._rows), waiting, len(self._running), tokens, rows)
        self._running[worker] += count
        return [self._rows.popleft() for _ in range(count)]

    def more(self) -> str | None:
        return min(self._running, key=self._running.__getitem__) if self._rows and self._running else None

    def done(self, worker: str, rows: int) -> None:
        self._running[worker] -= rows

    def outstanding(self, worker: str) -> int:
        return self._running.get(worker, 0)

    def waiting(self) -> list[Row]:
        return list(self._rows)


class RowDispatcher(Protocol):
    """The used part of `policy.dispatcher.Dispatcher`."""

    def add(self, level: int, instance: str, capacity: float, outstanding: int = 0) -> None: ...

    def remove(self, instance: str) -> int: ...

    def dispatch(self, length: int) -> tuple[int, str] | None: ...

    def finish(self, instance: str) -> None: ...


class DispatchedQueues:
    """Each worker holds one bin and has its own queue; `dispatcher` chooses it when a row arrives.

    edges: of the bins, in the order of the dispatcher's levels; capacities: M_i of each.
    """

    def __init__(
        self, dispatcher: RowDispatcher, edges: Sequence[int], capacities: Sequence[float], pack_limits: PackLimits
    ) -> None:
        self._dispatcher = dispatcher
        self._edges = list(edges)
        self._capacities = list(capacities)
        self._limits = pack_limits
        self._queues: dict[str, deque[Row]] = {}
        self._bins: dict[str, int] = {}
        self._running: dict[str, int] = {}

    def add(self, worker: str, bin_edge: int) -> bool:
        # A worker with all engines serves the last bin. A worker of an older build, with another bin, serves the next
        # shorter one.
        level = bisect_right(self._edges, bin_edge) - 1 if bin_edge else len(self._edges) - 1
        if level < 0:
            return False
        self._dispatcher.add(level, worker, self._capacities[level])
        self._queues[worker] = deque()
        self._bins[worker] = self._edges[level] if bin_edge else 0
        self._running[worker] = 0
        return True

    def remove(self, worker: str) -> list[Row]:
        self._dispatcher.remove(worker)
        del self._bins[worker], self._running[worker]
        return list(self._queues.pop(worker))

    def put(self, row: Row) -> str | None:
        chosen = self._dispatcher.dispatch(row.tokens)
        if chosen is None:
            return None
        self._queues[chosen[1]].append(row)
        return chosen[1]

    def take(self, worker: str) -> list[Row]:
        queue = self._queues[worker]
        if not queue:
            return []
        tokens, rows = self._limits(self._bins[worker])
        count = rows_to_take((row.tokens for row in queue), len(queue), 1, tokens, rows)
        self._running[worker] += count
        return [queue.popleft() for _ in range(count)]

    def more(self) -> str | None:
        return None

    def done(self, worker: str, rows: int) -> None:
        self._running[worker] -= rows
        for _ in range(rows):
            self._dispatcher.finish(worker)

    def outstanding(self, worker: str) -> int:
        return len(self._queues.get(worker, ())) + self._running.get(worker, 0)

    def waiting(self) -> list[Row]:
        return [row for queue in self._queues.values() for row in queue]
