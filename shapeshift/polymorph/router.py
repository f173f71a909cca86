"""Placements `resident` and `partitioned`: the front queues rows and workers, other processes, compute them.

Nothing here waits for a worker but the thread that calls it. A row is given up on a worker that does not answer in
time and goes to another; the first answer counts. The scheduler (`shapeshift.scheduler`) replaces what is dead.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from shapeshift.engines.request import Row, TextRequest
from shapeshift.errors import EngineError, OverloadedError
from shapeshift.polymorph.assignment import Assignment
from shapeshift.polymorph.links import LANES, Flight, Link
from shapeshift.polymorph.profile import ServiceTimes
from shapeshift.polymorph.roster import Roster
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.polymorph.worker_client import State, WorkerClient, WorkerGoneError, WorkerSickError, WrongBinError
from shapeshift.serving.log import Log
from shapeshift.serving.metrics import Counter, Gauge

_WATCH_S = 0.02
_DISCOVER_S = 0.5
_LEAST_TIMEOUT_S = 0.25
_TIMEOUT_FACTOR = 5.0
_ATTEMPTS = 3
_HUNG = 5
# Rows for which no worker is there wait so long: a reload takes seconds, a first load of everything longer.
_NO_WORKER_S = 30.0
_UNLOADED = "the model is being unloaded; retry elsewhere"


class RouterPool:
    """The rows, the workers, and the threads that bring them together."""

    def __init__(
        self,
        client: WorkerClient,
        workers: Sequence[str],
        assignment: Assignment,
        times: ServiceTimes,
        settings: PolymorphSettings,
        log: Log,
    ) -> None:
        self._client = client
        self._times = times
        self._lock = threading.Lock()
        self._roster = Roster(self._lock, workers, assignment, settings.queue_rows, settings.queue_tokens, log)
        self._hung: list[Row] = []
        self._closing = threading.Event()
        self._calls, self._rows, self._timeouts = 0, 0, 0
        self._threads = [
            threading.Thread(target=loop, name=loop.__name__.strip("_"), daemon=True)
            for loop in (self._watch, self._discover)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Rows that no worker has been given yet."""
        return self._roster.waiting.rows

    @property
    def running(self) -> int:
        """Rows in calls to workers."""
        return sum(len(flight.rows) for flight in self._roster.under_way())

    @property
    def loaded(self) -> int:
        """Workers that rows are given to."""
        return self._roster.joined

    def metrics(self) -> list[Counter | Gauge]:
        """What is exported beside the front's own metrics."""
        return [
            Gauge("workers_joined", "Workers that texts are given to", lambda: self.loaded),
            Counter("worker_calls_total", "Calls to workers", read=lambda: self._calls),
            Counter("worker_rows_total", "Texts that workers have computed", read=lambda: self._rows),
            Counter("retries_total", "Texts given to another worker", read=lambda: self._roster.retries),
            Counter("timeouts_total", "Calls to workers that were given up", read=lambda: self._timeouts),
            *(gauge for link in self._roster.links.values() for gauge in self._gauges(link)),
        ]

    def submit(self, request: TextRequest) -> None:
        """Queue all rows of `request`; OverloadedError when they do not fit."""
        with self._lock:
            if self._closing.is_set():
                raise OverloadedError(_UNLOADED)
            self._roster.waiting.refuse_when_full(request.rows)
            self._roster.put(request.rows)

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer what waits with UNAVAILABLE, let running calls end, stop the threads."""
        with self._lock:
            self._closing.set()
            self._roster.wake_all()
        deadline = time.monotonic() + timeout_s
        # A call that fails meanwhile puts its rows back: they are looked for until none runs.
        while self._fail_waiting() and time.monotonic() < deadline:
            time.sleep(_WATCH_S)
        with self._lock:
            stuck = [row for link in self._roster.links.values() for flight in link.flights for row in flight.rows]
        _fail_unloaded(stuck)
        for thread in self._threads:
            thread.join(timeout_s)

    def _fail_waiting(self) -> bool:
        with self._lock:
            waiting = self._roster.waiting.all()
            running = bool(self._roster.under_way())
        _fail_unloaded(waiting)
        return running

    def _gauges(self, link: Link) -> list[Gauge]:
        def outstanding() -> int:
            return self._roster.outstanding(link.name)

        labels = {"worker": link.name}
        return [
            Gauge("worker_outstanding", "Texts that wait for this worker or run on it", outstanding, labels),
            Gauge("worker_timeouts", "Calls in a row not answered in time", lambda: link.timeouts, labels),
        ]

    # Calls: two threads a worker.

    def _open_lanes(self, link: Link) -> None:
        while link.lanes < LANES:
            link.lanes += 1
            threading.Thread(target=self._lane, args=(link,), name=f"lane-{link.name}", daemon=True).start()

    def _lane(self, link: Link) -> None:
        while (flight := self._next(link)) is not None:
            rows = [row for row in flight.rows if not row.done and row.request.still_wanted()]
            if flight.rows and not rows:
                self._ended(link, flight)
            else:
                self._call(link, flight, rows)
            if flight.given_up:
                return

    def _next(self, link: Link) -> Flight | None:
        with self._lock:
            while not self._closing.is_set():
                rows = self._roster.take(link)
                if rows or link.hello:
                    link.hello = False
                    self._roster.wake_another()
                    return self._start(link, rows)
                link.wake.wait()
        return None

    def _start(self, link: Link, rows: Sequence[Row]) -> Flight:
        now = time.monotonic()
        edge = link.state.bin if link.state else 0
        expected_ms = self._times.of_pack(edge, sum(row.tokens for row in rows)) if rows else 0.0
        in_all_s = (link.expected_ms() + expected_ms) / 1e3
        deadline = now + max(_LEAST_TIMEOUT_S, _TIMEOUT_FACTOR * in_all_s)
        flight = Flight(rows, expected_ms, deadline, link.stay)
        link.flights.append(flight)
        link.heard = now
        return flight

    def _call(self, link: Link, flight: Flight, rows: Sequence[Row]) -> None:
        before = time.perf_counter()
        try:
            outputs, state = self._client.call(link.name, [row.ids for row in rows])
        except Exception as error:  # noqa: BLE001  whatever a worker does, its rows go on
            self._failed(link, flight, error)
            return
        took_ms = (time.perf_counter() - before) * 1e3
        for index, row in enumerate(rows):
            row.request.complete(row, {name: values[index] for name, values in outputs.items()}, took_ms)
        # Last, so that `close` knows of all answers when no call is under way.
        self._ended(link, flight, state)

    def _ended(self, link: Link, flight: Flight, state: State | None = None) -> None:
        with self._lock:
            self._roster.landed(link, flight)
            if state is not None:
                self._calls += 1
                self._rows += len(flight.rows)
                self._roster.answered(link, flight, state)

    def _failed(self, link: Link, flight: Flight, error: Exception) -> None:
        of_itself = isinstance(error, WorkerGoneError | WorkerSickError | WrongBinError)
        with self._lock:
            flight.deadline = math.inf
            if not of_itself and not flight.given_up:
                for row in flight.rows:
                    row.attempts += 1
        for row in flight.rows:
            if row.attempts >= _ATTEMPTS:
                row.request.fail(EngineError(f"the engine failed {_ATTEMPTS} times: {error}"))
        with self._lock:
            self._roster.landed(link, flight)
            # What an earlier process of the worker did says nothing of the one that has joined since.
            if flight.stay == link.stay:
                self._roster.distrust(link, error, bool(flight.rows))
            if not flight.given_up:
                self._roster.again(flight.rows)

    # Time.

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(_WATCH_S):
            now = time.monotonic()
            stood_still, last = now - last, now
            with self._lock:
                for link in self._roster.links.values():
                    if stood_still > _LEAST_TIMEOUT_S:
                        for flight in link.flights:
                            flight.deadline += stood_still
                    for flight in link.overdue(now):
                        self._give_up(link, flight)
            self._end_late(now)

    def _give_up(self, link: Link, flight: Flight) -> None:
        flight.given_up = True
        self._timeouts += 1
        link.lost += 1
        link.lanes -= 1
        self._open_lanes(link)
        if flight.stay == link.stay:
            link.timeouts += 1
            self._roster.leave(link, "did not answer in time")
        for row in flight.rows:
            row.hung += 1
        # A text that makes every worker hang must not take all of them out.
        self._hung += [row for row in flight.rows if row.hung >= _HUNG]
        self._roster.again([row for row in flight.rows if row.hung < _HUNG])

    def _end_late(self, now: float) -> None:
        with self._lock:
            waiting = self._roster.waiting.all()
            deserted = self._roster.waiting.homeless_since(now - _NO_WORKER_S)
            hung, self._hung = self._hung, []
        for request in {row.request for row in waiting}:
            request.fail_if_late()
        for row in hung:
            row.request.fail(OverloadedError(f"{_HUNG} workers in turn gave no answer in time; retry later"))
        for row in deserted:
            row.request.fail(
                OverloadedError(f"no worker for a text of {row.tokens} tokens is there; is the scheduler running?")
            )
        with self._lock:
            self._roster.waiting.drop_ended()

    def _discover(self) -> None:
        # A worker is found by asking it. To ask the server whether it is ready kills this process while the server
        # itself is not (Triton 24.10).
        while not self._closing.wait(_DISCOVER_S):
            with self._lock:
                for link in self._roster.links.values():
                    if link.to_be_asked(time.monotonic()):
                        link.hello = True
                        self._open_lanes(link)
                        link.wake.notify()


def _fail_unloaded(rows: Sequence[Row]) -> None:
    for row in rows:
        row.request.fail(OverloadedError(_UNLOADED))
