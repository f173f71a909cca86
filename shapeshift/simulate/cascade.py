"""The levels of a cascade as discrete events, under the routing that serves (Tabi).

The first level runs in the front's engine threads, each later one in instances of its own model. Confidences are drawn
from the reliability that profiling noted in a candidate table; times are the mean ones of the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from shapeshift import settings
from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import Candidate, CandidateTable
from shapeshift.cascade.policy import routing
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.settings import require
from shapeshift.simulate.events import Events, Progress
from shapeshift.simulate.outcome import Outcome, in_time, latencies, timeliness
from shapeshift.workloads.trace import Trace


@dataclass(frozen=True)
class CascadeLaw:
    """A simulated cascade.

    candidates  file of a candidate table, as `shapeshift cascade register` writes it
    candidate   of its candidates; empty: the fastest of those of most levels
    routing     sigmoid or cut, instead of the candidate's
    cutoff      c of all its gaps instead of the candidate's; below 0: the candidate's
    engine_threads  of the first level; instances: of each later one
    control_ms  time of the decisions after each level
    hop_ms      time of a call to a later level, beside its engine
    overhead_ms  time of each text beside all this: network, reading, answering
    kill_s, recovery_s  when the later levels die (0: never), and until they serve again: texts keep what they have
    """

    candidates: str
    candidate: str = ""
    routing: str = ""
    cutoff: float = -1.0
    engine_threads: int = 1
    instances: int = 1
    control_ms: float = 0.02
    hop_ms: float = 0.5
    overhead_ms: float = 0.0
    kill_s: float = 0.0
    recovery_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("engine_threads", "instances"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("control_ms", "hop_ms", "overhead_ms", "kill_s", "recovery_s"):
            require(0 <= getattr(self, name) < np.inf, name, getattr(self, name), "0 or more")
        allowed = ("", *routing.ALGORITHMS)
        require(self.routing in allowed, "routing", self.routing, f"one of {', '.join(allowed[1:])}")
        require(self.cutoff <= 1, "cutoff", self.cutoff, "at most 1")


@dataclass(frozen=True)
class SimulationResult:
    """By text: time until its answer, the level that gave it (from 1), and whether a later one should have."""

    latency_ms: NDArray[np.float64]
    level: NDArray[np.uint8]
    fell_back: NDArray[np.bool_]


class _Level:
    """Servers that take one text each. is_alive: whether they answer."""

    def __init__(self, servers: int, took_s: float, rule: routing.RoutingRule | None) -> None:
        self.free, self.took_s, self.rule = servers, took_s, rule
        self.waiting: deque[int] = deque()


def run(
    law: CascadeLaw,
    candidate: Candidate,
    confidence: NDArray[np.float64],
    at_s: NDArray[np.float64],
    seed: int = 0,
    progress: Progress | None = None,
) -> SimulationResult:
    """Serve texts to the end. confidence: FLOAT64 [levels - 1, texts], of each level but the last."""
    return _Cascade(law, candidate, confidence, at_s, seed).run(progress)


class _Cascade:
    def __init__(
        self,
        law: CascadeLaw,
        candidate: Candidate,
        confidence: NDArray[np.float64],
        at_s: NDArray[np.float64],
        seed: int,
    ) -> None:
        self._law, self._at_s = law, at_s
        self._events = Events()
        rules = [*(gap.rule for gap in candidate.gaps), None]
        servers = [law.engine_threads] + [law.instances] * len(candidate.gaps)
        hops = [0.0] + [law.hop_ms] * len(candidate.gaps)
        self._levels = [
            _Level(count, (ms + hop + law.control_ms) / 1e3, rule)
            for count, ms, hop, rule in zip(servers, candidate.model_latencies, hops, rules, strict=True)
        ]
        self._confidence = confidence.tolist()
        # Another stream than one that draws confidences by the same seed.
        self._draws = np.random.default_rng([seed, 1]).random(confidence.shape).tolist()
        self._is_dead = False
        count = len(at_s)
        self._done = np.full(count, np.nan)
        self._level = np.zeros(count, np.uint8)
        self._fell_back = np.zeros(count, bool)

    def run(self, progress: Progress | None) -> SimulationResult:
        if self._law.kill_s:
            self._events.at(self._law.kill_s, self._set_dead, True)
            self._events.at(self._law.kill_s + self._law.recovery_s, self._set_dead, False)
        self._events.run(self._at_s, lambda text: self._put(0, text), progress)
        latency_ms = (self._done - self._at_s) * 1e3 + self._law.overhead_ms
        return SimulationResult(latency_ms, self._level, self._fell_back)

    def _put(self, place: int, text: int) -> None:
        if place and self._is_dead:
            self._fall_back(place, text)
            return
        self._levels[place].waiting.append(text)
        self._begin(place)

    def _begin(self, place: int) -> None:
        level = self._levels[place]
        while level.free and level.waiting:
            level.free -= 1
            text = level.waiting.popleft()
            self._events.at(self._events.now + level.took_s, self._computed, (place, text))

    def _computed(self, value: tuple[int, int]) -> None:
        place, text = value
        level = self._levels[place]
        level.free += 1
        if place and self._is_dead:
            self._fall_back(place, text)
        elif level.rule is not None and self._draws[place][text] < routing.p_large(
            self._confidence[place][text], level.rule
        ):
            self._put(place + 1, text)
        else:
            self._answer(place, text)
        self._begin(place)

    def _answer(self, place: int, text: int) -> None:
        self._done[text], self._level[text] = self._events.now, place + 1

    def _fall_back(self, place: int, text: int) -> None:
        """The text keeps the answer of the level before, see `CascadeService`."""
        self._fell_back[text] = True
        self._answer(place - 1, text)

    def _set_dead(self, is_dead: bool) -> None:
        self._is_dead = is_dead
        for place, level in enumerate(self._levels[1:], 1):
            while is_dead and level.waiting:
                self._fall_back(place, level.waiting.popleft())


def drawn_confidence(table: CandidateTable, model: str, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Confidences of a model by the reliability that profiling noted. Raises InvalidInputError where it noted none."""
    bins = table.origin.get("reliability", {}).get(model, [])
    require(bool(bins), "candidates", model, "a table with the reliability of its models")
    counts = np.array([one["count"] for one in bins], float)
    chosen = rng.choice(len(bins), count, p=counts / counts.sum())
    low, high, mean = (np.array([float(one[name]) for one in bins])[chosen] for name in ("low", "high", "confidence"))
    # A power of a uniform number that has the mean of its bin.
    place = ((mean - low) / (high - low)).clip(1e-3, 1 - 1e-3)
    confidence: NDArray[np.float64] = low + (high - low) * rng.random(count) ** ((1 - place) / place)
    return confidence


@dataclass(frozen=True)
class CascadeSystem:
    """A cascade of a scenario."""

    SETTINGS: ClassVar[Sequence[type]] = (CascadeLaw,)

    law: CascadeLaw
    table: CandidateTable
    candidate: Candidate

    @classmethod
    def read(cls, values: Mapping[str, str]) -> CascadeSystem:
        """Raises InvalidInputError naming a field."""
        law = settings.read(CascadeLaw, values)
        table = candidates.read(Path(law.candidates))
        require(not table.is_regression, "candidates", table.kind, "a table of a classification")
        most = max(len(one.levels) for one in table.candidates)
        fastest = min((one for one in table.candidates if len(one.levels) == most), key=lambda one: one.latency_ms)
        try:
            candidate = table.candidate(law.candidate) if law.candidate else fastest
        except NotFoundError as error:
            raise InvalidInputError("candidate", law.candidate, str(error)) from None
        gaps = tuple(
            replace(gap, algorithm=law.routing or gap.algorithm, c=law.cutoff if law.cutoff >= 0 else gap.c)
            for gap in candidate.gaps
        )
        system = cls(law, table, replace(candidate, gaps=gaps))
        for model in candidate.levels[:-1]:
            drawn_confidence(table, model, 1, np.random.default_rng(0))
        return system

    def serve(self, trace: Trace, progress: Progress | None = None) -> Outcome:
        """See `scenario.System`."""
        rng = np.random.default_rng(0)
        levels = self.candidate.levels
        drawn = [drawn_confidence(self.table, model, len(trace), rng) for model in levels[:-1]]
        confidence = np.array(drawn).reshape(len(drawn), len(trace))
        result = run(self.law, self.candidate, confidence, trace.at_s, progress=progress)
        answered = np.bincount(result.level, minlength=len(levels) + 1)[1:] / len(trace)
        figures = {
            "requests": len(trace),
            **{f"by level {number}": share for number, share in enumerate(answered.tolist(), 1)},
            "fell back": float(result.fell_back.mean()),
            **timeliness(in_time(result.latency_ms, trace), trace),
            **latencies(result.latency_ms),
        }
        return Outcome(figures, result.latency_ms)
