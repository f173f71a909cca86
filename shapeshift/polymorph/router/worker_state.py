"""The state of one worker as the router sees it, and the calls in flight to it."""

from __future__ import annotations

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
# A worker that does not answer is probed less often, but at least this often.
_MIN_PROBE_PAUSE_S, _MAX_PROBE_PAUSE_S = 0.9, 1.5


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
    joined, so that a call of an earlier epoch may be to a process that was replaced; joined_at: the last time;
    timeouts: in a row, since its last answer, in time or late; failures: of calls with rows, in a row; problem: why
    it is not used although it answers, empty where it is; probe_due: whether to ask for its report; last_contact: when
    a call began, or ended before its deadline; last_end: when a call ended; calls: in flight, without abandoned ones.
    """

    name: str
    info: WorkerInfo | None = None
    joined: bool = False
    epoch: int = 0
    joined_at: float = 0.0
    timeouts: int = 0
    failures: int = 0
    problem: str = ""
    probe_due: bool = False
    last_contact: float = 0.0
    last_end: float = 0.0
    calls: list[WorkerCall] = field(default_factory=list)

    def is_silent(self, now: float) -> bool:
        """Whether a probe is due: every answer carries the report, but no call is in flight."""
        pause = min(max(_MIN_PROBE_PAUSE_S, self.timeouts), _MAX_PROBE_PAUSE_S)
        return not self.calls and now - self.last_contact > pause

    def end(self, call: WorkerCall, now: float) -> float:
        """Remove a call that has ended. Returns for how many milliseconds the worker was busy with it alone.

        A worker runs its calls one after another: the second one waits there for the first to end.
        """
        self.calls.remove(call)
        busy_s = now - max(call.began, self.last_end)
        self.last_end = now
        return busy_s * 1e3

    def expected_ms(self) -> float:
        """The time of the calls in flight, by the profile."""
        return sum(call.expected_ms for call in self.calls)
