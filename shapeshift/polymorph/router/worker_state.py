"""The state of one worker as the router sees it, and the calls in flight to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shapeshift.engines.execution.request import Row
from shapeshift.polymorph.router.transport import WorkerInfo

# One call runs in the worker, one waits there for it to end.
MAX_IN_FLIGHT = 2
# After so many timeouts in a row, without an answer that came late, the sidecar reloads the worker.
DEAD_AFTER = 2
# A worker that fails so many calls in a row leaves until a probe succeeds.
FAILING_AFTER = 2
# The time limit of a call: at least so much, and so many times what is expected.
MIN_TIMEOUT_S = 0.25
_TIMEOUT_FACTOR, _MOST_DOUBLINGS = 5.0, 3
# What is recent.
_RECENT_S = 0.5
# Pauses between probes. The longer a worker has left, the longer they are, and the more time has it to answer: these
# shares of the time since then.
_MIN_PROBE_PAUSE_S, _MAX_PROBE_PAUSE_S = 0.1, 0.9
_PAUSE_SHARE, _LIMIT_SHARE = 0.05, 0.15
_MAX_PROBE_S = 10.0


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

    def is_silent(self, now: float) -> bool:
        """Whether a probe is due: every answer carries the report, but no call is in flight."""
        pause_s = _MAX_PROBE_PAUSE_S
        if not self.joined:
            pause_s = min(max(_MIN_PROBE_PAUSE_S, _PAUSE_SHARE * (now - self.left_at)), pause_s)
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

    def time_limit_s(self, expected_ms: float, now: float, slowness: float = 1.0) -> float:
        """For a call of so many milliseconds by the profile that begins `now`; slowness: factor on all such times.

        A worker that was late gets twice the time each time: a row fails after some late calls.
        """
        known_ms = slowness * (self.expected_ms() + expected_ms) + self.delay_ms
        least_s = MIN_TIMEOUT_S * 2.0 ** min(self.late, _MOST_DOUBLINGS)
        if not self.joined:
            least_s = min(max(MIN_TIMEOUT_S, _LIMIT_SHARE * (now - self.left_at)), _MAX_PROBE_S)
        return max(least_s, _TIMEOUT_FACTOR * known_ms / 1e3)

    def expected_ms(self) -> float:
        """The time of the calls in flight, by the profile."""
        return sum(call.expected_ms for call in self.calls)
