"""The front of texts as discrete events: the queues of the server over workers that take the time of their profile.

Which row waits where, and which rows share a call, is decided by the objects that decide it in the server
(`polymorph.router.assignment`); `simulate.planner` adds the sidecar. Calls take lognormal times by the median and the
p99 of their profile.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import exp

import numpy as np
from numpy.typing import NDArray

from shapeshift.engines.execution.engine_set import cost_curve
from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.errors import OverloadedError
from shapeshift.polymorph.router.membership import MAX_IN_FLIGHT
from shapeshift.polymorph.router.placement import queues
from shapeshift.polymorph.service_times import entry_of_bin
from shapeshift.serving.bounds import Bound, TimeBound
from shapeshift.sidecar.front_config import Front
from shapeshift.simulate.events import Events
from shapeshift.workloads.trace import Trace

P99 = 2.326
"""Of a normal distribution, in standard deviations."""
_DRAWS = 10007
SERVED, REFUSED, LATE, UNSERVED = range(4)
OUTCOMES = ("served", "refused", "late", "unserved")
"""What can become of a text: refused on arrival; its latency_ms ran out while it waited; no worker ever took it."""


class Row:
    """A text that waits: what the queues read of one."""

    __slots__ = ("arrived", "index", "latency_ms", "slo_class", "tokens")

    def __init__(
        self, index: int, tokens: int, arrived: float, latency_ms: float = 0.0, slo_class: str | None = None
    ) -> None:
        self.index, self.tokens, self.arrived = index, tokens, arrived
        self.latency_ms, self.slo_class = latency_ms, slo_class

    def is_late(self, now: float) -> bool:
        """Whether its latency_ms has run out."""
        return bool(self.latency_ms) and (now - self.arrived) * 1e3 > self.latency_ms


@dataclass(eq=False, slots=True)
class Worker:
    """A process that serves calls one after another.

    calls: in flight, each its rows and its time in ms; free_at: when the last one ends; waiting: rows that wait for it
    alone.
    """

    name: str
    bin: int
    free_at: float
    calls: list[tuple[Sequence[Row], float]] = field(default_factory=list)
    waiting: int = 0


def call_ms(engines: Manifest, edges: Sequence[int], field: str = "median_ms") -> dict[int, list[float]]:
    """What calls take, by bin (0: on the fastest engine) and tokens in all: a field of the profile's points.

    Engines are chosen by the best times of the profile, as in the server.
    """
    most = engines.pack_tokens

    def curve(entry: EngineEntry) -> NDArray[np.float64]:
        points = tuple(replace(point, best_ms=getattr(point, field)) for point in entry.latency)
        return cost_curve(replace(entry, latency=points), most)

    chosen = np.argmin([cost_curve(entry, most) for entry in engines.engines], axis=0)
    fastest = np.array([curve(entry) for entry in engines.engines])[chosen, np.arange(most + 1)]
    of_bins = {edge: curve(entry_of_bin(engines, edge)) for edge in edges}
    return {bin_edge: values.tolist() for bin_edge, values in {**of_bins, 0: fastest}.items()}


def spreads(median: Mapping[int, list[float]], p99: Mapping[int, list[float]]) -> dict[int, list[float]]:
    """The standard deviations of the logarithms of times, as `call_ms`; {} where every p99 is the median."""
    with np.errstate(invalid="ignore"):
        by_bin = {one: (np.log(np.array(p99[one]) / median[one]) / P99).clip(min=0) for one in median}
    return {one: values.tolist() for one, values in by_bin.items()} if any(map(np.nanmax, by_bin.values())) else {}


Call = tuple[float, Worker, Sequence[Row], float]
"""When it ended, on which worker, with which rows, and what it took in ms."""


class SimulatedFront:
    """Rows arrive (`arrive`), workers join (`add`) and leave (`remove`).

    listeners: each gets every call that ends.
    spent_ms: the time of all calls since it was cleared, by the bin of their workers.
    """

    def __init__(self, events: Events, front: Front, engines: Manifest, trace: Trace, overhead_ms: float = 0.0) -> None:
        settings = front.settings
        self._events = events
        self._queues, self._times = queues(engines, settings, front.edges)
        self._call_ms = call_ms(engines, front.edges)
        self._spreads = spreads(self._call_ms, call_ms(engines, front.edges, "p99_ms"))
        self._draws = cycle(np.random.default_rng(0).standard_normal(_DRAWS).tolist())
        # Engine threads take a call when the one before has ended; workers have the next one waiting.
        self._depth = 1 if settings.placement == "inline" else MAX_IN_FLIGHT
        self._is_shared = settings.placement != "partitioned"
        self._rows_bound = Bound("queue_rows", settings.queue_rows, "rows")
        self._time_bound = TimeBound("max_queue_ms", settings.max_queue_ms)
        self._has_time_bound = settings.max_queue_ms > 0
        self._overhead_s = overhead_ms / 1e3
        self._tokens = trace.length.tolist()
        self._deadlines = trace.latency_ms.tolist() if trace.has("latency_ms") else None
        self._classes = trace.slo_class.tolist() if trace.has("slo_class") else None
        self.workers: dict[str, Worker] = {}
        self.waiting = 0
        self.listeners: list[Callable[[Call], object]] = []
        self.spent_ms: defaultdict[int, float] = defaultdict(float)
        self._orphans: list[Row] = []
        self._done_s = array("d", bytes(8 * len(trace)))
        self._outcome = bytearray([UNSERVED]) * len(trace)
        self._arrived_s = trace.at_s

    def arrive(self, index: int) -> bool:
        """The row `index` of the trace arrives now. Returns whether it is taken."""
        latency_ms = 0.0 if self._deadlines is None else self._deadlines[index]
        slo_class = None if self._classes is None else self._classes[index]
        row = Row(index, self._tokens[index], self._events.now, latency_ms, slo_class)
        if self.waiting and not self._is_admitted(row):
            self._outcome[index] = REFUSED
            return False
        self.waiting += 1
        self._put(row)
        return True

    def add(self, name: str, bin_edge: int) -> None:
        """A worker joins, and takes texts of up to `bin_edge` tokens; 0: any."""
        self.workers[name] = Worker(name, bin_edge, self._events.now)
        self._queues.add(name, bin_edge)
        orphans, self._orphans = self._orphans, []
        for row in orphans:
            self._put(row)
        self._begin(self.workers[name])

    def remove(self, name: str, died: bool = False) -> float:
        """A worker leaves: what waits for it goes to others, and if it has `died`, what runs on it too.

        Returns when its last call ends.
        """
        worker = self.workers.pop(name)
        rows = self._queues.remove(name)
        if died:
            running = [row for computed, _ in worker.calls for row in computed]
            self.waiting += len(running)
            rows += running  # type: ignore[arg-type]
            worker.calls.clear()
        for row in rows:
            self._put(row)  # type: ignore[arg-type]
        return worker.free_at

    def outstanding(self) -> dict[str, int]:
        """Rows that wait for each worker alone, or run on it."""
        return {name: self._queues.outstanding(name) for name in self.workers}

    def latencies_ms(self) -> NDArray[np.float64]:
        """Of all rows, nan of those without an answer."""
        took = (np.frombuffer(self._done_s) + self._overhead_s - self._arrived_s) * 1e3
        return np.where(self.outcomes() == SERVED, took, np.nan)

    def outcomes(self) -> NDArray[np.uint8]:
        """Of each row, an index of OUTCOMES."""
        return np.frombuffer(self._outcome, np.uint8)

    def _is_admitted(self, row: Row) -> bool:
        """See `Router.submit` and `EngineExecutor.submit`."""
        try:
            self._rows_bound.require(self.waiting)
            if row.latency_ms or self._has_time_bound:
                self._time_bound.require(self._predicted_ms(row), row.latency_ms or None)
        except OverloadedError:
            return False
        return True

    def _predicted_ms(self, row: Row) -> float:
        def in_flight(name: str) -> float:
            return sum(took_ms for _, took_ms in self.workers[name].calls)

        wait_ms = self._queues.wait_ms(row.tokens, in_flight, row.slo_class)
        return wait_ms + self._times.of_row(0, row.tokens)

    def _put(self, row: Row) -> None:
        name = self._queues.put(row)  # type: ignore[arg-type]
        if name is None:
            self._orphans.append(row)
            return
        worker = self.workers[name]
        worker.waiting += 1
        if len(worker.calls) < self._depth:
            self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        """Start every call for which there are rows: on `worker`, and where all share the rows on others."""
        if not self._is_shared:
            while worker.waiting and len(worker.calls) < self._depth:
                rows = self._queues.take(worker.name)
                worker.waiting -= len(rows)
                self._call(worker, rows)  # type: ignore[arg-type]
            return
        ready = {worker.name: worker}
        while ready:
            worker = ready.pop(next(iter(ready)))
            while len(worker.calls) < self._depth:
                rows = self._queues.take(worker.name)
                if more := self._queues.more():
                    ready[more] = self.workers[more]
                if not rows:
                    break
                self._call(worker, rows)  # type: ignore[arg-type]

    def _call(self, worker: Worker, rows: Sequence[Row]) -> None:
        now = self._events.now
        self.waiting -= len(rows)
        if self._deadlines is not None and (late := [row for row in rows if row.is_late(now)]):
            for row in late:
                self._outcome[row.index] = LATE
            self._queues.done(worker.name, len(late))
            rows = [row for row in rows if row not in late]
        if rows:
            tokens = rows[0].tokens if len(rows) == 1 else sum(row.tokens for row in rows)
            took_ms = self._call_ms[worker.bin][tokens]
            if self._spreads:
                took_ms *= exp(self._spreads[worker.bin][tokens] * next(self._draws))
            worker.calls.append((rows, took_ms))
            self.spent_ms[worker.bin] += took_ms
            worker.free_at = end = (worker.free_at if worker.free_at > now else now) + took_ms / 1e3
            self._events.at(end, self._end, worker)

    def _end(self, worker: Worker) -> None:
        if not worker.calls:
            # It has died.
            return
        rows, took_ms = worker.calls.pop(0)
        now = self._events.now
        for row in rows:
            self._done_s[row.index] = now
            self._outcome[row.index] = SERVED
        for listen in self.listeners:
            listen((now, worker, rows, took_ms))
        if self.workers.get(worker.name) is worker:
            self._queues.done(worker.name, len(rows))
            if self.waiting:
                self._begin(worker)
