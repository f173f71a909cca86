"""The workers as the router sees them: which get rows, and which may start a call. Used under the router's lock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import Logger

from shapeshift.engines.execution.request import Row
from shapeshift.engines.policy.packs import MeasuredFactor
from shapeshift.errors import ModelDiedError, ModelGoneError
from shapeshift.polymorph.router.assignment import Assignment, PendingRows
from shapeshift.polymorph.router.transport import OtherVersionError, WorkerInfo, WrongBinError
from shapeshift.serving.call_pool import CallTimeoutError

# One call runs in the worker, one waits there for it to end.
MAX_IN_FLIGHT = 2
# After so many timeouts in a row, without an answer that came late, the sidecar reloads the worker.
DEAD_AFTER = 2
# A worker that fails so many calls in a row leaves until a probe succeeds.
FAILING_AFTER = 2
# The time limit of a call is so many times what is expected.
_TIMEOUT_FACTOR, _MOST_DOUBLINGS = 5.0, 3
# What is recent.
_RECENT_S = 0.5
# The longer a worker has left, the longer are the pauses between probes, and the more time has it to answer: these
# shares of the time since then.
_PAUSE_SHARE, _LIMIT_SHARE = 0.05, 0.15
_MAX_PROBE_S = 10.0
# A worker that has just reported its bin is not probed at once.
_REPORTED_S = 0.5
# What is late after a worker has left counts as one more timeout where that is so long ago, and so many times the wait
# for the call for which it left: a worker that is slow runs that call still, and the next ones wait behind it.
_LATE_AGAIN_S, _LATE_AGAIN_FACTOR = 4.0, 3.0


@dataclass(frozen=True)
class Pace:
    """How often a router looks after its workers, and how long it waits for them, in seconds.

    watch_s, probe_s: between looks at calls that may be late, and at workers that may be silent; min_pause_s,
    max_pause_s: between probes of a worker; least_limit_s: of a call; no_worker_s: how long a row waits while no worker
    takes it: a reload takes seconds, the first load of all workers longer.
    """

    watch_s: float = 0.02
    probe_s: float = 0.1
    min_pause_s: float = 0.1
    max_pause_s: float = 0.9
    least_limit_s: float = 0.25
    no_worker_s: float = 30.0


PACE = Pace()


@dataclass(frozen=True, eq=False)
class WorkerCall:
    """One call: its rows, none for a probe; its time by the profile; the worker's epoch when it began, and when that
    was, in monotonic seconds."""

    rows: Sequence[Row]
    expected_ms: float
    epoch: int
    began: float


@dataclass(eq=False)
class WorkerState:
    """One worker as the router sees it. Changed under the router's lock only.

    info: the worker's last report, None before the first; joined: whether it gets rows; epoch: how often it has
    joined, so that a call of an earlier epoch may be to a process that was replaced; joined_at, left_at: the last time;
    timeouts: in a row, since its last answer, in time or late; failures: of calls with rows, in a row; problem: why
    it is not used although it answers, empty where it is; probe_due: whether to ask for its report; last_contact: when
    a call began, or ended before its deadline; last_end: when a call ended; calls: in flight, without abandoned ones;
    delay_ms: for how long calls have recently been on their way, or waited in the worker for calls of other fronts;
    foreign_share: of the worker's time, what calls of other fronts have recently taken; reported_at: when `report` was
    last called; late: calls with rows in a row that were not answered in time, whether or not an answer came later;
    late_s: for how long the call for which it left was waited for.
    """

    name: str
    info: WorkerInfo | None = None
    joined: bool = False
    epoch: int = 0
    joined_at: float = 0.0
    left_at: float = -math.inf
    timeouts: int = 0
    failures: int = 0
    problem: str = ""
    probe_due: bool = False
    last_contact: float = 0.0
    last_end: float = 0.0
    calls: list[WorkerCall] = field(default_factory=list)
    delay_ms: float = 0.0
    foreign_share: float = 0.0
    reported_at: float = 0.0
    late: int = 0
    late_s: float = 0.0

    def is_silent(self, now: float, pace: Pace = PACE) -> bool:
        """Whether a probe is due: every answer carries the report, but no call is in flight."""
        pause_s = pace.max_pause_s
        if not self.joined:
            pause_s = min(max(pace.min_pause_s, _PAUSE_SHARE * (now - self.left_at)), pause_s)
        return not self.calls and now - self.last_contact > pause_s

    def end(self, call: WorkerCall, now: float) -> float:
        """Remove a call that has ended. Returns for how many milliseconds the worker was busy with it alone.

        A worker runs its calls one after another: the second one waits there for the first to end.
        """
        self.calls.remove(call)
        busy_s = now - max(call.began, self.last_end)
        self.last_end = now
        return busy_s * 1e3

    def report(self, info: WorkerInfo, took_ms: float, now: float) -> None:
        """Record a report. took_ms: for how long the worker was busy with its call, as `end` returns it."""
        passed_s, self.reported_at = now - self.reported_at, now
        # Of reports that come often, each counts less.
        weight = 1.0 - math.exp(-passed_s / _RECENT_S)
        delay_ms = max(took_ms - info.call_us / 1e3, 0.0)
        self.delay_ms += weight * (delay_ms - self.delay_ms)
        before, self.info = self.info, info
        if before is not None and before.pid == info.pid and passed_s > 0:
            foreign_s = (info.busy_us - before.busy_us - info.call_us) / 1e6
            share = min(max(foreign_s / passed_s, 0.0), 1.0)
            self.foreign_share += weight * (share - self.foreign_share)

    def time_limit_s(self, expected_ms: float, now: float, slowness: float = 1.0, pace: Pace = PACE) -> float:
        """For a call of so many milliseconds by the profile that begins `now`; slowness: factor on all such times.

        A worker that was late gets twice the time each time: a row fails after some late calls.
        """
        known_ms = slowness * (self.expected_ms() + expected_ms) + self.delay_ms
        least_s = pace.least_limit_s * 2.0 ** min(self.late, _MOST_DOUBLINGS)
        if not self.joined:
            least_s = min(max(pace.least_limit_s, _LIMIT_SHARE * (now - self.left_at)), _MAX_PROBE_S)
        return max(least_s, _TIMEOUT_FACTOR * known_ms / 1e3)

    def expected_ms(self) -> float:
        """The time of the calls in flight, by the profile."""
        return sum(call.expected_ms for call in self.calls)


class Membership:
    """Lets workers join and leave, and keeps the list of those that may have a call to start.

    workers: the candidates, by name; `offer` replaces the mapping, so that reading it needs no lock.
    """

    def __init__(self, assignment: Assignment, max_rows: int, log: Logger) -> None:
        self.workers: Mapping[str, WorkerState] = {}
        self.pending = PendingRows(assignment, max_rows)
        self.classes = assignment.classes
        self.retries = 0
        self.measured = MeasuredFactor()
        self._assignment = assignment
        self._log = log
        # A set in order of arrival.
        self._ready: dict[str, None] = {}

    def offer(self, names: Sequence[str]) -> None:
        """Let these workers, and no others, be the candidates. Calls to a former candidate end as they would have."""
        if list(self.workers) == list(names):
            return
        offered = set(names)
        for former in [worker for name, worker in self.workers.items() if name not in offered]:
            self.leave(former, "is no longer offered")
            self._ready.pop(former.name, None)
        self.workers = {name: self.workers.get(name) or WorkerState(name) for name in names}

    @property
    def joined(self) -> int:
        """Workers that get rows."""
        return sum(worker.joined for worker in self.workers.values())

    @property
    def slowness(self) -> float:
        """How many times as long as by the profile recent calls took, at least 1."""
        return max(1.0, self.measured.value)

    def calls(self) -> list[WorkerCall]:
        """The calls in flight. Needs no lock."""
        return [call for worker in self.workers.values() for call in list(worker.calls)]

    def by_worker(self, value: Callable[[WorkerState], float]) -> Callable[[], dict[str, float]]:
        """A function that reads `value` of each candidate; of a former one, which Triton goes on to export, 0."""
        shown: dict[str, float] = {}

        def read() -> dict[str, float]:
            shown.update(dict.fromkeys(shown, 0.0))
            shown.update((worker.name, value(worker)) for worker in self.workers.values())
            return shown

        return read

    def outstanding(self, worker: str) -> int:
        """Rows that wait for the worker alone, and that run on it."""
        return self._assignment.outstanding(worker)

    def predicted_ms(self, rows: Sequence[Row], cost_ms: Callable[[Row], float]) -> float:
        """The time after which `rows`, put now, would be computed: the profile, corrected by recent calls.

        cost_ms: of a row by the profile. Only what waits before the rows counts where no worker takes them now.
        """
        lengths, slo_class = {row.tokens for row in rows}, rows[0].slo_class
        wait_ms = max(self._assignment.wait_ms(tokens, self._in_flight_ms, slo_class) for tokens in lengths)
        costs_ms = [cost_ms(row) for row in rows]
        return self.measured.value * (wait_ms + max(sum(costs_ms) / max(1, self.joined), max(costs_ms)))

    def put(self, rows: Sequence[Row]) -> None:
        """Add rows that wait."""
        self._mark_ready(self.pending.put(rows))

    def retry(self, rows: Sequence[Row]) -> None:
        """Add rows that have waited for, or run on, another worker, where they still need an answer."""
        self.retries += sum(row.is_open for row in rows)
        self.put(rows)

    def next_ready(self) -> WorkerState | None:
        """A worker that may have a call to start; each is returned once, until the next reason."""
        if not self._ready:
            return None
        name = next(iter(self._ready))
        del self._ready[name]
        return self.workers[name]

    def take(self, worker: WorkerState) -> list[Row]:
        """The rows of the worker's next call; none where it has not joined or should wait."""
        if not worker.joined:
            return []
        rows = self.pending.take(worker.name)
        # Rows may be left, or be left to a worker that has become the better one.
        self._mark_shared()
        return rows

    def probe(self, worker: WorkerState) -> None:
        """Let the worker's next call, empty if need be, ask for its report."""
        worker.probe_due = True
        self._mark_ready([worker.name])

    def answered(self, worker: WorkerState, call: WorkerCall, took_ms: float) -> None:
        """Record an answer, however late: a worker that answers is slow, and a new process would be no faster."""
        if call not in worker.calls:
            self.measured.observe(took_ms, call.expected_ms)
        if call.epoch == worker.epoch:
            worker.timeouts = 0
            if call.rows:
                worker.failures = 0

    def ended(self, worker: WorkerState, call: WorkerCall, outcome: WorkerInfo | Exception | None) -> None:
        """Record how a call ended: with the worker's report, an error, or None where no row needed it any more."""
        now = time.monotonic()
        took_ms = worker.end(call, now)
        if not isinstance(outcome, CallTimeoutError):
            worker.last_contact = now
        before = worker.info
        if isinstance(outcome, WorkerInfo):
            self.measured.observe(took_ms, call.expected_ms)
            if call.rows:
                worker.late = 0
            worker.report(outcome, took_ms, now)
        if self.workers.get(worker.name) is not worker:
            return
        self._mark_ready([worker.name])
        # An earlier epoch's call may be to a process that was replaced: it says nothing about the present one.
        if call.epoch != worker.epoch:
            return
        if worker.joined:
            self._assignment.done(worker.name, len(call.rows))
            self._assignment.delayed(worker.name, worker.delay_ms)
        if isinstance(outcome, Exception):
            self._failed(worker, call, outcome)
        elif outcome is not None:
            self._join(worker, outcome, before)

    def leave(self, worker: WorkerState, reason: str) -> None:
        """Give a worker no further rows, and the rows that waited for it to other workers."""
        if not worker.joined:
            return
        worker.joined = False
        worker.left_at = time.monotonic()
        self._log.warning(f"{worker.name}: left, it {reason}")
        self.retry(self.pending.remove_worker(worker.name))
        self._mark_shared()

    def _in_flight_ms(self, worker: str) -> float:
        return self.workers[worker].expected_ms()

    def _join(self, worker: WorkerState, info: WorkerInfo, before: WorkerInfo | None) -> None:
        """Give a worker rows if by its report it can take any. before: its last report."""
        changed = before is None or before.bin != info.bin
        if worker.joined and not changed:
            return
        self.leave(worker, f"has bin {info.bin} now")
        if not self.pending.add_worker(worker.name, info.bin):
            if changed:
                self._log.warning(f"{worker.name}: not used, its bin {info.bin or 'any'} is not one of this model's")
            return
        self._assignment.delayed(worker.name, worker.delay_ms)
        worker.joined = True
        worker.epoch += 1
        worker.joined_at = time.monotonic()
        worker.problem = ""
        self._log.info(f"{worker.name}: joined, bin {info.bin or 'any'}, generation {info.generation}")
        self._mark_ready([*self.pending.reassign_orphans(), worker.name])

    def _failed(self, worker: WorkerState, call: WorkerCall, error: Exception) -> None:
        if isinstance(error, CallTimeoutError):
            worker.late += bool(call.rows)
            now = time.monotonic()
            patience_s = 0.0 if worker.joined else max(_LATE_AGAIN_S, _LATE_AGAIN_FACTOR * worker.late_s)
            worker.timeouts += now - worker.left_at > patience_s
            worker.late_s = now - call.began if worker.joined else worker.late_s
            self.leave(worker, "did not answer in time")
        elif isinstance(error, ModelGoneError):
            self.leave(worker, "is not ready")
        elif isinstance(error, ModelDiedError):
            worker.timeouts = max(worker.timeouts, DEAD_AFTER)
            self.leave(worker, "has died")
        elif isinstance(error, WrongBinError):
            self.leave(worker, "has another bin")
            if time.monotonic() - worker.joined_at > _REPORTED_S:
                self.probe(worker)
        elif isinstance(error, OtherVersionError):
            self.leave(worker, "is of another version")
            if worker.problem != str(error):
                worker.problem = str(error)
                self._log.warning(f"{worker.name}: not used: {error}")
        elif call.rows:
            # A worker that fails at once would otherwise always be free first, and attract every row.
            worker.failures += 1
            if worker.failures >= FAILING_AFTER:
                self.leave(worker, f"failed {worker.failures} times in a row: {error}")

    def _mark_ready(self, workers: Iterable[str]) -> None:
        self._ready.update(dict.fromkeys(workers))

    def _mark_shared(self) -> None:
        """Mark a worker for the rows that any worker may take."""
        if worker := self._assignment.more():
            self._mark_ready([worker])
