"""Placements `resident` and `partitioned`: the front queues rows, and workers (other processes) compute them.

The router never waits for a worker: its transport does. A row whose call is late goes to another worker, and its first
answer counts. The sidecar (`shapeshift.sidecar`) replaces dead processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from logging import Logger

from shapeshift.engines.execution.request import Row, TextRequest, trace_call
from shapeshift.engines.interfaces import Ids
from shapeshift.errors import EngineError, ModelDiedError, ModelGoneError, OverloadedError
from shapeshift.loops import Loop
from shapeshift.polymorph.router.assignment import Assignment
from shapeshift.polymorph.router.membership import MAX_IN_FLIGHT, PACE, Membership, Pace, WorkerCall, WorkerState
from shapeshift.polymorph.router.transport import (
    Exchange,
    OtherVersionError,
    Outputs,
    Transport,
    WorkerInfo,
    WrongBinError,
)
from shapeshift.polymorph.service_times import ServiceTimes
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.serving.bounds import TimeBound, unloading
from shapeshift.serving.call_pool import CallTimeoutError
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Counter, Gauge, Gauges

# A row fails after so many failed calls, or so many late ones.
_MAX_FAILURES, _MAX_TIMEOUTS = 3, 5


class Router:
    """Starts calls to workers while rows wait, and handles their outcomes."""

    def __init__(
        self,
        transport: Transport,
        assignment: Assignment,
        times: ServiceTimes,
        settings: PolymorphSettings,
        log: Logger,
        pace: Pace = PACE,
    ) -> None:
        self.pace = pace
        self._transport = transport
        self._times = times
        self._lock = threading.Lock()
        self.members = Membership(assignment, settings.queue_rows, log)
        self.members.offer(transport.workers())
        self.time_bound = TimeBound("max_queue_ms", settings.max_queue_ms)
        self._closing = threading.Event()
        self._calls, self._rows = 0, 0
        self.steps = [StepCounter("router-watch", lambda: self.waiting + self.running > 0)]
        self._next_probe = time.monotonic() + pace.probe_s
        self._watcher = Loop("router-watch", self._watch, log.error)
        self._watcher.start()

    @property
    def waiting(self) -> int:
        """Rows that wait for a call."""
        return self.members.pending.rows

    @property
    def running(self) -> int:
        """Rows in calls to workers."""
        return sum(len(call.rows) for call in self.members.calls())

    @property
    def loaded(self) -> int:
        """Workers that get rows."""
        return self.members.joined

    def metrics(self) -> list[Counter | Gauge | Gauges]:
        """The router's metrics, exported beside the front's own."""
        each = self.members.by_worker
        return [
            Gauge("workers_joined", "Workers that get texts", lambda: self.loaded),
            Counter("worker_calls_total", "Calls that workers have answered", read=lambda: self._calls),
            Counter("worker_rows_total", "Texts that workers have computed", read=lambda: self._rows),
            Counter("retries_total", "Texts given to another worker", read=lambda: self.members.retries),
            Counter("timeouts_total", "Calls to workers that were abandoned", read=lambda: self._transport.timeouts),
            Gauges("worker_outstanding", "Texts that wait for it or run on it", "worker", each(self._outstanding)),
            Gauges("worker_timeouts", "Calls in a row not answered in time", "worker", each(lambda one: one.timeouts)),
            Gauges("worker_delay_ms", "Time of calls outside the engine", "worker", each(lambda one: one.delay_ms)),
            Gauges("worker_foreign_share", "Time for other fronts", "worker", each(lambda one: one.foreign_share)),
            *self.members.classes.metrics(),
        ]

    def require_room(self, latency_ms: float | None, slo_class: str | None) -> None:
        """Never raises: which workers a request waits for depends on its texts."""

    def submit(self, request: TextRequest) -> None:
        """Queue all rows of `request`. Raises OverloadedError where they do not fit, or would be answered too late."""
        self._transport.serve()
        with self._lock:
            if self._closing.is_set():
                raise unloading()
            # An empty queue takes any request: its prediction could be wrong, and no call would correct it.
            if self.members.pending.rows:
                predicted_ms = self.members.predicted_ms(request.rows, lambda row: self._times.of_row(0, row.tokens))
                request.require_in_time(predicted_ms, self.time_bound)
            self.members.pending.require_capacity(request.rows)
            self.members.put(request.rows)
            self._start_calls()

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer waiting rows with UNAVAILABLE, let running calls end, stop the threads."""
        with self._lock:
            self._closing.set()
        self._fail_waiting()
        self._transport.close(timeout_s)
        # A call that failed just before may have put its rows back.
        self._fail_waiting()
        self._watcher.stop(timeout_s)

    def _fail_waiting(self) -> None:
        with self._lock:
            waiting = self.members.pending.all()
        _fail(waiting, unloading())

    def _outstanding(self, worker: WorkerState) -> int:
        return self.members.outstanding(worker.name)

    # A call: decide (under the lock), run (on a thread of the transport), record.

    def _start_calls(self) -> None:
        """Under the lock: start every call that has rows, or a probe that is due, and a worker for it."""
        while not self._closing.is_set() and (worker := self.members.next_ready()) is not None:
            if self._transport.is_exhausted(worker.name):
                self.members.leave(worker, "has too many calls that did not return")
                continue
            while len(worker.calls) < MAX_IN_FLIGHT:
                rows = self.members.take(worker)
                if not (rows or worker.probe_due):
                    break
                self._start(worker, rows)

    def _start(self, worker: WorkerState, rows: Sequence[Row]) -> None:
        bin_edge = worker.info.bin if worker.info else 0
        expected_ms = self._times.of_pack(bin_edge, sum(row.tokens for row in rows)) if rows else 0.0
        worker.last_contact = now = time.monotonic()
        timeout_s = worker.time_limit_s(expected_ms, now, self.members.slowness, self.pace)
        call = WorkerCall(rows, expected_ms, worker.epoch, now)
        worker.calls.append(call)
        worker.probe_due = False
        begun: list[Row] = []
        exchange = Exchange(
            worker.name,
            now + timeout_s,
            partial(self._begin, call, begun),
            partial(self._answered, worker, call, begun),
            partial(self._record, worker, call),
        )
        self._transport.start(exchange)

    def _begin(self, call: WorkerCall, begun: list[Row]) -> list[Ids] | None:
        """Note the rows that still need an answer; their texts, None where the call is not needed any more."""
        # Asking Triton whether a client has cancelled blocks: not under the lock.
        begun += (row for row in call.rows if not row.done and row.request.should_run())
        return [row.ids for row in begun] if begun or not call.rows else None

    def _answered(
        self, worker: WorkerState, call: WorkerCall, begun: Sequence[Row], outputs: Outputs, took_ms: float
    ) -> None:
        """Complete the rows, even if the call has been abandoned."""
        # Before the client gets its answer, and may ask again.
        with self._lock:
            self._calls += 1
            self._rows += len(begun)
            self.members.answered(worker, call, took_ms)
        size = worker.info.bin if worker.info else 0
        trace_call(begun, call.began, {"worker": worker.name, "bin": size, "predicted_ms": call.expected_ms})
        for index, row in enumerate(begun):
            row.request.complete(row, {name: values[index] for name, values in outputs.items()}, took_ms, size)

    def _record(self, worker: WorkerState, call: WorkerCall, outcome: WorkerInfo | Exception | None) -> None:
        if isinstance(outcome, Exception):
            self._count_failure(call.rows, outcome)
        with self._lock:
            self.members.ended(worker, call, outcome)
            if isinstance(outcome, Exception):
                self.members.retry(call.rows)
            self._start_calls()
            closing = self._closing.is_set()
        if closing:
            # `close` may have failed the waiting rows before these were put back.
            self._fail_waiting()

    def _count_failure(self, rows: Sequence[Row], error: Exception) -> None:
        """Fail the rows that get no further call."""
        if self._closing.is_set():
            _fail(rows, unloading())
        elif isinstance(error, CallTimeoutError):
            for row in rows:
                row.timeouts += 1
            # A text that makes every worker hang must not disable all of them.
            text = f"{_MAX_TIMEOUTS} workers in turn gave no answer in time; retry later"
            _fail((row for row in rows if row.timeouts >= _MAX_TIMEOUTS), OverloadedError(text))
        elif not isinstance(error, ModelGoneError | ModelDiedError | WrongBinError | OtherVersionError):
            for row in rows:
                row.failures += 1
            text = f"the engine failed {_MAX_FAILURES} times: {error}"
            _fail((row for row in rows if row.failures >= _MAX_FAILURES), EngineError(text))

    # Time.

    def _watch(self) -> float:
        with self.steps[0].running():
            now = time.monotonic()
            self._end_late(now)
            if now >= self._next_probe:
                self._next_probe = now + self.pace.probe_s
                self._find_workers(now)
        return self.pace.watch_s

    def _end_late(self, now: float) -> None:
        pending = self.members.pending
        with self._lock:
            waiting, orphans = pending.all(), pending.orphans_since(now - self.pace.no_worker_s)
        for request in {row.request for row in waiting}:
            request.fail_if_late()
        for row in orphans:
            text = f"no worker takes a text of {row.tokens} tokens; is the sidecar running?"
            row.request.fail(OverloadedError(text))
        with self._lock:
            pending.drop_finished_orphans()

    def _find_workers(self, now: float) -> None:
        offered = self._transport.workers()
        # A worker joins by the answer to a call. Asking the server whether it is ready kills this process while the
        # server itself is not ready (Triton 24.10).
        with self._lock:
            self.members.offer(offered)
            for worker in self.members.workers.values():
                if worker.is_silent(now, self.pace):
                    self.members.probe(worker)
            self._start_calls()


def _fail(rows: Iterable[Row], error: Exception) -> None:
    for row in rows:
        row.request.fail(error)
