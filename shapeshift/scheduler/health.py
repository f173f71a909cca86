"""Which models are dead, and why: decided from heartbeats and time-outs, scrape by scrape.

Only scrapes are counted, never seconds, so that neither a clock that jumps nor a sidecar that was held up
takes a living model for a dead one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from shapeshift.scheduler.sight import Fate

FateOf = Callable[[int], Fate]


@dataclass(frozen=True)
class Rules:
    """When a model is dead.

    ended: scrapes in a row that show the same beats, of a process that was seen alive and has ended; still: the
    same where there is no such process; unseen: where it cannot be looked up; hung: where it exists. silent:
    scrapes without any beat of a new process, after a load. timeouts: requests in a row that a worker left
    unanswered. settle: scrapes after a load for which the time-outs may still be those from before it.
    """

    ended: int = 2
    still: int = 3
    unseen: int = 6
    hung: int = 30
    silent: int = 10
    timeouts: int = 2
    settle: int = 3


@dataclass(frozen=True)
class Dead:
    """Why a model is dead; `certain` unless its process exists and may only be slow."""

    reason: str
    certain: bool


@dataclass
class _Watched:
    """One model. `same` counts the scrapes in a row that show the same beats, the first of them included."""

    beats: dict[int, float] = field(default_factory=dict)
    same: int = 0
    before_load: frozenset[int] = frozenset()
    timeouts: int = 0
    settling: int = 0


class Health:
    """Remembers the models' last beats. One thread uses it."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self._models: dict[str, _Watched] = {}

    def look(
        self,
        beats: Mapping[str, Mapping[int, float]],
        timeouts: Mapping[str, int],
        fate_of: FateOf,
        loading: Collection[str] = (),
        expected: Collection[str] = (),
    ) -> dict[str, Dead]:
        """The dead models and why, after one more scrape.

        beats: by model and process, also of processes that have ended; timeouts: in a row, by worker; loading:
        models that are being loaded, of which nothing is concluded; expected: models that are loaded and should
        have a heartbeat. Models that are none of these are forgotten.
        """
        known = {*beats, *expected, *timeouts, *loading}
        self._models = {model: self._models.get(model, _Watched()) for model in known}
        dead: dict[str, Dead] = {}
        for model, watched in self._models.items():
            counted = timeouts.get(model, 0)
            self._count(watched, beats.get(model, {}))
            if model in loading:
                # What is on the page now belongs to the process that is being replaced.
                watched.before_load = frozenset(watched.beats)
                watched.same, watched.settling = 0, self._rules.settle
            found = self._still(watched, fate_of) or self._unanswered(watched, counted)
            if found and model not in loading:
                dead[model] = found
        return dead

    def _count(self, watched: _Watched, beats: Mapping[int, float]) -> None:
        moved = {pid for pid, count in beats.items() if watched.beats.get(pid) != count}
        first = not watched.beats and watched.same == 0
        watched.same = 1 if moved and not first else watched.same + 1
        # A load that failed leaves the old process in service.
        watched.before_load -= moved
        watched.beats = dict(beats)

    def _still(self, watched: _Watched, fate_of: FateOf) -> Dead | None:
        rules, same = self._rules, watched.same
        pids = [pid for pid in watched.beats if pid not in watched.before_load]
        if not pids:
            return Dead(f"no heartbeat in {rules.silent} scrapes", True) if same >= rules.silent else None
        fates = {fate_of(pid) for pid in pids}
        named = f"process {', '.join(map(str, pids))}"
        if Fate.ALIVE in fates:
            held_up = Dead(f"no heartbeat of {named} in {rules.hung} scrapes, though it exists", False)
            return held_up if same >= rules.hung else None
        if Fate.UNSEEN in fates:
            return Dead(f"no heartbeat of {named} in {rules.unseen} scrapes", True) if same >= rules.unseen else None
        needed = rules.ended if Fate.ENDED in fates else rules.still
        return Dead(f"{named} is gone, its heartbeat stands still", True) if same >= needed else None

    def _unanswered(self, watched: _Watched, timeouts: int) -> Dead | None:
        if watched.settling > 0:
            watched.settling -= 1
            watched.timeouts = timeouts
        # A gauge that has not moved since the load tells of the process before it.
        watched.timeouts = min(watched.timeouts, timeouts)
        if timeouts >= self._rules.timeouts and timeouts > watched.timeouts:
            return Dead(f"{self._rules.timeouts} requests in a row timed out", False)
        return None


class Backoff:
    """How soon a model may be loaded again: at once the first time, then ever later while that does not help.

    Seconds of one monotonic clock, given by the caller. After the n-th attempt in a row the next one waits
    `first_s` x 2^(n - 1), at most `most_s`; a model that was well for twice that, and for `well_s`, starts anew.
    """

    def __init__(self, first_s: float = 2.0, most_s: float = 300.0, well_s: float = 10.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._well_s = well_s
        self._attempts: dict[str, tuple[int, float]] = {}

    def wait_s(self, model: str, now: float) -> float:
        """Seconds until the model may be loaded again; 0 for now."""
        attempts, last = self._current(model, now)
        return max(last + self._delay(attempts) - now, 0.0) if attempts else 0.0

    def note(self, model: str, now: float) -> None:
        """An attempt to load the model has just ended, well or not."""
        self._attempts[model] = (self._current(model, now)[0] + 1, now)

    def _current(self, model: str, now: float) -> tuple[int, float]:
        attempts, last = self._attempts.get(model, (0, now))
        return (0, now) if now - last > max(2 * self._delay(attempts), self._well_s) else (attempts, last)

    def _delay(self, attempts: int) -> float:
        return min(self._first_s * 2.0 ** min(attempts - 1, 30), self._most_s)
