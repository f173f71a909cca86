"""Which models are dead, and why: decided from heartbeats, stalled threads and timeouts, scrape by scrape.

Only scrapes are counted, never seconds, so neither a clock that jumps nor a sidecar that is delayed makes a living
model look dead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shapeshift.sidecar.observe import StalledThread, listed
from shapeshift.triton.embedded.process_tracker import ProcessState

StateOf = Callable[[int], ProcessState]


@dataclass(frozen=True)
class HealthLimits:
    """How many scrapes in a row it takes until a model is dead.

    ended, absent, suspended, unknown, hung: scrapes with unchanged heartbeats, if the process is ENDED, ABSENT,
    SUSPENDED, UNKNOWN or ALIVE.
    silent: scrapes after a load without any heartbeat of a new process.
    timeouts: requests in a row that a worker did not answer (requests, not scrapes).
    settle: scrapes after a load in which timeouts and stalled threads may still be those from before the load.
    """

    ended: int = 2
    absent: int = 3
    suspended: int = 3
    unknown: int = 6
    hung: int = 30
    silent: int = 10
    timeouts: int = 2
    settle: int = 3


@dataclass(frozen=True)
class DeadModel:
    """Why a model is dead.

    certain: false if its process exists and may only be slow. hung: processes to end once others have replaced them.
    suspended: processes to end before that. ended: whether none of its processes is left, and the server must give it
    no more requests: it is unloaded first.
    """

    reason: str
    certain: bool
    hung: tuple[int, ...] = ()
    suspended: tuple[int, ...] = ()
    ended: bool = False


@dataclass
class _Model:
    """One model. `unchanged` counts the scrapes in a row with the same heartbeats, including the first of them."""

    heartbeats: dict[int, float] = field(default_factory=dict)
    unchanged: int = 0
    before_load: frozenset[int] = frozenset()
    timeouts: int = 0
    stalled: Mapping[StalledThread, float] = field(default_factory=dict)
    settling: int = 0


class HealthTracker:
    """Remembers what the last scrape showed of the models. Not thread-safe."""

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self._models: dict[str, _Model] = {}

    def update(
        self,
        heartbeats: Mapping[str, Mapping[int, float]],
        timeouts: Mapping[str, int],
        state_of: StateOf,
        loading: Collection[str] = (),
        expected: Collection[str] = (),
        stalled: Mapping[str, Mapping[StalledThread, float]] = MappingProxyType({}),
    ) -> dict[str, DeadModel]:
        """Take one more scrape into account; returns the dead models.

        heartbeats: counter by model and pid, including processes that have ended. timeouts: in a row, by worker.
        loading: models that are being loaded; they are never reported. expected: models that are loaded and should
        have a heartbeat; another model is not missed before it has had one. stalled: by model, seconds without a step,
        0 for threads within their limit. A model that is in none of these is forgotten.
        """
        models = {*heartbeats, *expected, *timeouts, *loading}
        self._models = {name: self._models.get(name, _Model()) for name in models}
        dead: dict[str, DeadModel] = {}
        for name, model in self._models.items():
            counted = timeouts.get(name, 0)
            self._count(model, heartbeats.get(name, {}))
            settling = model.settling > 0
            model.settling -= settling
            if name in loading:
                # The heartbeats of this scrape belong to the process that the load replaces.
                model.before_load = frozenset(model.heartbeats)
                model.unchanged, model.settling = 0, self._limits.settle
            verdict = (
                (self._stopped(model, state_of) if model.heartbeats or name in expected else None)
                or self._unanswered(model, counted, settling)
                or self._stalled(model, stalled.get(name, {}), settling)
            )
            if verdict and name not in loading:
                dead[name] = verdict
        return dead

    def _count(self, model: _Model, heartbeats: Mapping[int, float]) -> None:
        moved = {pid for pid, count in heartbeats.items() if model.heartbeats.get(pid) != count}
        first = not model.heartbeats and model.unchanged == 0
        model.unchanged = 1 if moved and not first else model.unchanged + 1
        # A load that failed leaves the old process in service.
        model.before_load -= moved
        model.heartbeats = dict(heartbeats)

    def _stopped(self, model: _Model, state_of: StateOf) -> DeadModel | None:
        limits, unchanged = self._limits, model.unchanged
        pids = [pid for pid in model.heartbeats if pid not in model.before_load]
        if not pids:
            return DeadModel(f"no heartbeat in {limits.silent} scrapes", True) if unchanged >= limits.silent else None
        by_pid = {pid: state_of(pid) for pid in pids}
        states = set(by_pid.values())
        process = listed(pids)
        ended = states <= {ProcessState.ENDED, ProcessState.ABSENT}
        if ProcessState.ALIVE in states:
            limit, certain = limits.hung, False
            reason = f"no heartbeat of {process} in {limit} scrapes, although it exists"
        elif ProcessState.SUSPENDED in states:
            limit, certain = limits.suspended, True
            reason = f"no heartbeat of {process} in {limit} scrapes: it is suspended (SIGSTOP)"
        elif ProcessState.UNKNOWN in states:
            limit, certain = limits.unknown, True
            reason = f"no heartbeat of {process} in {limit} scrapes"
        else:
            limit, certain = limits.ended if ProcessState.ENDED in states else limits.absent, True
            reason = f"{process} has ended and its heartbeat has stopped"
        if unchanged < limit:
            return None
        suspended = tuple(pid for pid, state in by_pid.items() if certain and state is ProcessState.SUSPENDED)
        return DeadModel(reason, certain, suspended=suspended, ended=ended or bool(suspended))

    def _unanswered(self, model: _Model, timeouts: int, settling: bool) -> DeadModel | None:
        if settling:
            model.timeouts = timeouts
        # A gauge that has not risen since the load counts timeouts of the process before it.
        model.timeouts = min(model.timeouts, timeouts)
        if timeouts >= self._limits.timeouts and timeouts > model.timeouts:
            return DeadModel(f"{self._limits.timeouts} requests in a row timed out", False)
        return None

    def _stalled(self, model: _Model, stalled: Mapping[StalledThread, float], settling: bool) -> DeadModel | None:
        # The series of a process that has ended stay, but do not grow; a living one exports 0 until a thread stalls.
        growing = [thread for thread, seconds in stalled.items() if seconds > model.stalled.get(thread, math.inf)]
        model.stalled = stalled
        if settling or not growing:
            return None
        thread = max(growing, key=lambda thread: stalled[thread])
        subject = f"thread {thread.name} of {listed([thread.pid])}"
        text = f"{subject} has work and has done no step for {stalled[thread]:.0f} s"
        return DeadModel(text, False, (thread.pid,))


class ReloadBackoff:
    """How soon a model may be loaded again: at once the first time, then after growing delays.

    All times are seconds of one monotonic clock. After the n-th attempt in a row the next one waits
    `first_s` x 2^(n - 1), at most `max_s`. A model that stays healthy for twice its last delay, and for at least
    `healthy_s`, starts again at once.
    """

    def __init__(self, first_s: float = 2.0, max_s: float = 300.0, healthy_s: float = 10.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._healthy_s = healthy_s
        self._attempts: dict[str, tuple[int, float]] = {}

    def wait_s(self, model: str, now: float) -> float:
        """Seconds until the model may be loaded again; 0 if it may be loaded now."""
        attempts, last = self._current(model, now)
        return max(last + self._delay(attempts) - now, 0.0) if attempts else 0.0

    def record(self, model: str, now: float) -> None:
        """Count an attempt to load the model that has just ended, successful or not."""
        self._attempts[model] = (self._current(model, now)[0] + 1, now)

    def attempts(self, model: str) -> int:
        """Attempts in a row; they count until `seen_alive` after the model was healthy."""
        return self._attempts.get(model, (0, 0.0))[0]

    def seen_alive(self, model: str, now: float) -> None:
        """Start again at once if the model has been healthy for long enough."""
        if not self._current(model, now)[0]:
            self._attempts.pop(model, None)

    def _current(self, model: str, now: float) -> tuple[int, float]:
        attempts, last = self._attempts.get(model, (0, now))
        healthy = now - last > max(2 * self._delay(attempts), self._healthy_s)
        return (0, now) if healthy else (attempts, last)

    def _delay(self, attempts: int) -> float:
        return min(self._first_s * 2.0 ** min(attempts - 1, 30), self._max_s)
