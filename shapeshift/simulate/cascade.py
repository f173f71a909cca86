"""The levels of a cascade as discrete events, under the routing that serves (Tabi).

Each level is a front of texts (`simulate.polymorph`): the first in the front's engine threads, each later one in those
of its own model. Confidences are drawn from the reliability that profiling noted in a candidate table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from shapeshift.simulate import profile
from shapeshift.simulate.events import Events, Progress
from shapeshift.simulate.outcome import Outcome, in_time, latencies, timeliness
from shapeshift.simulate.planner import Pace
from shapeshift.simulate.polymorph import Call, SimulatedFront
from shapeshift.simulate.systems import TextSystem
from shapeshift.workloads.trace import Trace


@dataclass(frozen=True)
class CascadeLaw:
    """A simulated cascade.

    candidates  file of a candidate table, as `shapeshift cascade register` writes it
    candidate   of its candidates; empty: the fastest of those of most levels
    routing     sigmoid or cut, instead of the candidate's
    cutoff      c of all its gaps instead of the candidate's; below 0: the candidate's
    profiles    of each level, as `TextEngines.profile`; empty: one text a call, in the table's mean times
    engine_threads  of the first level; instances: of each later one; 0: one for each core
    control_ms  time of the decisions after each level
    hop_ms      time of a call to a later level, beside its engine
    overhead_ms  time of each text beside all this: network, reading, answering
    kill_s, recovery_s  when the later levels die (0: never), and until they serve again: texts keep what they have
    """

    candidates: str
    candidate: str = ""
    routing: str = ""
    cutoff: float = -1.0
    profiles: str = ""
    engine_threads: int = 0
    instances: int = 0
    control_ms: float = 0.02
    hop_ms: float = 0.5
    overhead_ms: float = 0.0
    kill_s: float = 0.0
    recovery_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("engine_threads", "instances", "control_ms", "hop_ms", "overhead_ms", "kill_s", "recovery_s"):
            require(0 <= getattr(self, name) < np.inf, name, getattr(self, name), "0 or more")
        allowed = ("", *routing.ALGORITHMS)
        require(self.routing in allowed, "routing", self.routing, f"one of {', '.join(allowed[1:])}")
        require(self.cutoff <= 1, "cutoff", self.cutoff, "at most 1")


@dataclass(frozen=True)
class SimulationResult:
    """By text: time until its answer, nan without one; the level that gave it, from 1, 0: refused; and whether a later
    one should have."""

    latency_ms: NDArray[np.float64]
    level: NDArray[np.uint8]
    fell_back: NDArray[np.bool_]


def levels(law: CascadeLaw, candidate: Candidate) -> list[TextSystem]:
    """The front of each level. Raises InvalidInputError."""
    files = law.profiles.split(",") if law.profiles else [""] * len(candidate.levels)
    allowed = f"one for each of {len(candidate.levels)} levels"
    require(len(files) == len(candidate.levels), "profiles", law.profiles, allowed)
    systems = []
    for place, (file, ms) in enumerate(zip(files, candidate.model_latencies, strict=True)):
        threads = {"engine_threads": str(law.instances if place else law.engine_threads), "placement": "inline"}
        if file:
            systems.append(TextSystem.read({"profile": file, **threads}))
            continue
        engines = profile.engines({"lengths": [1, 2], "latency_ms": [ms, ms]}, [], packing=False)
        systems.append(TextSystem({**threads, "max_queue_ms": "0"}, engines, [2], 1, Pace()))
    return systems


def run(
    law: CascadeLaw,
    candidate: Candidate,
    confidence: NDArray[np.float64],
    trace: Trace,
    seed: int = 0,
    progress: Progress | None = None,
) -> SimulationResult:
    """Serve texts to the end. confidence: FLOAT64 [levels - 1, texts], of each level but the last."""
    return _Cascade(law, candidate, confidence, trace, seed).run(progress)


class _Cascade:
    def __init__(
        self, law: CascadeLaw, candidate: Candidate, confidence: NDArray[np.float64], trace: Trace, seed: int
    ) -> None:
        self._law, self._at_s = law, trace.at_s
        lengths = trace.length if law.profiles else np.ones(len(trace), np.int64)
        self._trace = Trace(trace.at_s, lengths)
        self._events = Events()
        self._rules = [*(gap.rule for gap in candidate.gaps), None]
        self._systems = levels(law, candidate)
        self._levels = [self._level(place) for place in range(len(self._systems))]
        self._inside: list[set[int]] = [set() for _ in self._systems]
        self._confidence = confidence.tolist()
        # Another stream than one that draws confidences by the same seed.
        self._draws = np.random.default_rng([seed, 1]).random(confidence.shape).tolist()
        self._is_dead = False
        count = len(trace)
        self._done = np.full(count, np.nan)
        self._answered_by = np.zeros(count, np.uint8)
        self._fell_back = np.zeros(count, bool)

    def run(self, progress: Progress | None) -> SimulationResult:
        if self._law.kill_s:
            self._events.at(self._law.kill_s, self._set_dead, True)
            self._events.at(self._law.kill_s + self._law.recovery_s, self._set_dead, False)
        self._events.run(self._at_s, lambda text: self._put((0, text)), progress)
        latency_ms = (self._done - self._at_s) * 1e3 + self._law.overhead_ms
        return SimulationResult(latency_ms, self._answered_by, self._fell_back)

    def _level(self, place: int) -> SimulatedFront:
        """The engines of a level, all idle."""
        system = self._systems[place]
        front = system.front([1.0] * len(system.edges))
        level = SimulatedFront(self._events, front, system.engines, self._trace)
        level.listeners.append(partial(self._computed, place))
        for number in range(front.workers):
            level.add(f"engine-{number}", 0)
        return level

    def _put(self, placed: tuple[int, int]) -> None:
        place, text = placed
        self._inside[place].add(text)
        if (place and self._is_dead) or not self._levels[place].arrive(text):
            self._fall_back(place, text)

    def _computed(self, place: int, call: Call) -> None:
        for row in call[2]:
            # What had a level that died has fallen back.
            if row.index in self._inside[place]:
                self._step(place, row.index)

    def _step(self, place: int, text: int) -> None:
        """See `CascadeService`."""
        self._inside[place].remove(text)
        decided = self._events.now + self._law.control_ms / 1e3
        rule = self._rules[place]
        if rule is not None and self._draws[place][text] < routing.p_large(self._confidence[place][text], rule):
            self._events.at(decided + self._law.hop_ms / 1e3, self._put, (place + 1, text))
        else:
            self._done[text], self._answered_by[text] = decided, place + 1

    def _fall_back(self, place: int, text: int) -> None:
        """The text keeps the answer of the level before, where there is one."""
        self._inside[place].remove(text)
        if place:
            self._fell_back[text] = True
            self._done[text], self._answered_by[text] = self._events.now, place

    def _set_dead(self, is_dead: bool) -> None:
        self._is_dead = is_dead
        for place, inside in enumerate(self._inside[1:], 1):
            if is_dead:
                self._levels[place] = self._level(place)
            for text in sorted(inside):
                self._fall_back(place, text)


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
        levels(law, candidate)
        for model in candidate.levels[:-1]:
            drawn_confidence(table, model, 1, np.random.default_rng(0))
        return system

    def serve(self, trace: Trace, progress: Progress | None = None) -> Outcome:
        """See `scenario.System`."""
        rng = np.random.default_rng(0)
        models = self.candidate.levels
        drawn = [drawn_confidence(self.table, model, len(trace), rng) for model in models[:-1]]
        confidence = np.array(drawn).reshape(len(drawn), len(trace))
        result = run(self.law, self.candidate, confidence, trace, progress=progress)
        refused, *answered = (np.bincount(result.level, minlength=len(models) + 1) / len(trace)).tolist()
        figures = {
            "requests": len(trace),
            **({"refused": refused} if refused else {}),
            **{f"by level {number}": share for number, share in enumerate(answered, 1)},
            "fell back": float(result.fell_back.mean()),
            **timeliness(in_time(result.latency_ms, trace), trace),
            **latencies(result.latency_ms),
        }
        return Outcome(figures, result.latency_ms)
