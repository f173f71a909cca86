"""What to buy: the cheapest workers that hold an objective for a load, with simulation as the judge.

    [load]                  # as in a scenario
    trace = "trace.csv"
    arrivals = "csv"

    [slo]                   # see `Objective`
    latency_ms = 300

    [workers.cpu]           # see `Kind`, and `systems.TextEngines`
    profile = "profile.json"
    price = 1.0

A front has workers of one kind: its dispatcher knows one time for each bin. For each kind, placement, choice of bins
and dispatch the fewest workers are searched; what could not be cheaper than the best one so far is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.polymorph.policy import bins
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.settings import require
from shapeshift.simulate import profile, scenario
from shapeshift.simulate.outcome import in_time
from shapeshift.simulate.planner import Pace
from shapeshift.simulate.systems import TextEngines, TextSystem
from shapeshift.workloads.load import Load
from shapeshift.workloads.trace import Trace

PLACEMENTS, DISPATCHES = ("resident", "partitioned"), ("earliest_finish", "multilevel")
# How many static engines are tried, where the bins are not stated.
_BINS = (4, 8, 12)
# The objectives of the curve, as shares of the one that is stated.
CURVE = (0.6, 0.8, 1.0, 1.5, 2.5)
_NEAREST_TRIES, _NEAREST_STEP = 6, 1.05


@dataclass(frozen=True)
class Objective:
    """What must hold.

    latency_ms  the time in which texts are answered
    share       of them that are
    margin      so much more load must be borne, as a share of it
    """

    latency_ms: float
    share: float = 0.98
    margin: float = 0.1

    def __post_init__(self) -> None:
        require(0 < self.latency_ms < math.inf, "latency_ms", self.latency_ms, "above 0")
        require(0 < self.share < 1, "share", self.share, "above 0 and below 1")
        require(0 <= self.margin <= 10, "margin", self.margin, "0 to 10")


@dataclass(frozen=True)
class Kind:
    """A kind of worker. price: of one, in any unit; most: that can be had."""

    price: float
    most: int = 256

    def __post_init__(self) -> None:
        require(0 < self.price < math.inf, "price", self.price, "above 0")
        require(1 <= self.most <= 10_000, "most", self.most, "1 to 10000")


@dataclass(frozen=True)
class Candidate:
    """A front of one kind of worker."""

    kind: str
    price: float
    most: int
    placement: str
    dispatch: str
    system: TextSystem = field(repr=False)

    @property
    def described(self) -> dict[str, object]:
        """Its columns of a table."""
        words = {"workers of": self.kind, "placement": self.placement}
        words |= {"dispatch": self.dispatch} if self.placement == "partitioned" else {}
        return {**words, "bins": ",".join(map(str, self.system.edges)) or "none"}


@dataclass(frozen=True)
class Purchase:
    """So many workers of a candidate, the share of texts in time, and their latency at the objective's share."""

    candidate: Candidate
    workers: int
    share: float
    tail_ms: float

    @property
    def cost(self) -> float:
        return self.workers * self.candidate.price

    def row(self) -> dict[str, object]:
        """A row of a table."""
        figures = {"in time": self.share, "tail ms": self.tail_ms}
        return {"cost": self.cost, "workers": self.workers, **self.candidate.described, **figures}


@dataclass(frozen=True)
class Case:
    """What must hold, and what can be bought."""

    objective: Objective
    candidates: Sequence[Candidate]


@dataclass(frozen=True)
class Answer:
    """The cheapest purchase, the best one of each candidate that was not left out, and the costs by objective in ms."""

    best: Purchase
    others: Sequence[Purchase]
    curve: Sequence[tuple[float, Purchase | None]]


def read(path: Path, load: Load | None = None) -> tuple[Case, Trace]:
    """The case in the file `path` and its requests, with another load if given. Raises ShapeshiftError."""
    with scenario.named(str(path)):
        data = scenario.read_toml(path)
        settings.refuse_unknown(data, ("seed", "load", "slo", "polymorph", "sidecar", "workers"))
        for name in ("slo", "workers"):
            require(name in data, name, None, f"a section [{name}] is required")
        base = scenario.texts(data.get("polymorph", {}), "polymorph", (PolymorphSettings, TextEngines), path.parent)
        base |= scenario.texts(data.get("sidecar", {}), "sidecar", (Pace,), path.parent)
        limits = scenario.texts(data["slo"], "slo", (Objective,), path.parent)
        with scenario.named("[slo]"):
            objective = settings.read(Objective, limits)
        load = load or scenario.load_of(data.get("load", {}), path.parent)
        trace = load.draw(scenario.seed_of(data))
        kinds = {}
        for name, section in scenario.table(data["workers"], "workers").items():
            values = scenario.texts(section, f"workers.{name}", (Kind, TextEngines, PolymorphSettings), path.parent)
            with scenario.named(f"[workers.{name}]"):
                kinds[name] = list(_candidates(name, {**base, **values}, trace))
        require(bool(kinds), "workers", {}, "at least one section [workers.NAME]")
        candidates = [candidate for of_kind in kinds.values() for candidate in of_kind]
    return Case(objective, candidates), trace


def _candidates(name: str, values: Mapping[str, str], trace: Trace) -> Iterator[Candidate]:
    kind = settings.read(Kind, values)
    engines = settings.read(TextEngines, values)
    of_front = {key: text for key, text in values.items() if key not in ("price", "most")}
    choices = [engines.edges()]
    if not engines.bins and Path(engines.profile).suffix != ".pbtxt":
        choices = _edges(profile.read(Path(engines.profile)), trace)
    for placement in [values["placement"]] if "placement" in values else PLACEMENTS:
        dispatches = [values["dispatch"]] if "dispatch" in values else DISPATCHES
        for dispatch in dispatches if placement == "partitioned" else dispatches[:1]:
            for edges in choices:
                section = {**of_front, "placement": placement, "dispatch": dispatch, "bins": ",".join(map(str, edges))}
                # Checks them, too. Each simulation has its own objective.
                system = TextSystem.read({**section, "slo_ms": "1000"})
                yield Candidate(name, kind.price, kind.most, placement, dispatch, system)


def _edges(measured: Mapping[str, Any], trace: Trace) -> list[list[int]]:
    """The best bins for these lengths, of several numbers of them. A profile with engines of its own keeps them."""
    # Checks it, too.
    profile.engines(measured, ())
    if "engines" in measured:
        return [profile.lengths(measured)]
    lengths, latency_ms = measured["lengths"], measured["latency_ms"]
    longest = int(trace.length.max())
    if longest > lengths[-1]:
        raise InvalidInputError("profile", lengths[-1], f"must have the lengths of the load: up to {longest} tokens")
    curve = np.interp(np.arange(1, longest + 1), lengths, latency_ms)
    counts = np.bincount(trace.length, minlength=longest + 1)[1:]
    choices = [bins.optimal_edges(counts.tolist(), curve.tolist(), most)[0] for most in _BINS]
    return [edges for place, edges in enumerate(choices) if edges not in choices[:place]]


class Search:
    """Finds the cheapest purchase for a load. progress: called with what is tried."""

    def __init__(self, case: Case, trace: Trace, progress: Callable[[str], None] = lambda step: None) -> None:
        self._case, self._progress = case, progress
        self._trace = trace.scaled(1.0 + case.objective.margin)
        self._tried: dict[tuple[int, int, float], tuple[float, float]] = {}

    def answer(self) -> Answer:
        """Raises ShapeshiftError that names the nearest objective that holds, where this one cannot."""
        objective_ms = self._case.objective.latency_ms
        purchases = self.cheapest(objective_ms)
        if not purchases:
            self._refuse(objective_ms)
        best = min(purchases, key=lambda one: one.cost)
        curve: list[tuple[float, Purchase | None]] = []
        for share in CURVE:
            held = purchases if share == 1.0 else self.cheapest(objective_ms * share)
            curve.append((objective_ms * share, min(held, key=lambda one: one.cost, default=None)))
        return Answer(best, sorted(purchases, key=lambda one: one.cost), curve)

    def cheapest(self, objective_ms: float) -> list[Purchase]:
        """The purchases that hold, each cheaper than those before; none where nothing holds."""
        purchases: list[Purchase] = []
        for candidate in self._case.candidates:
            most = candidate.most
            if purchases:
                most = min(most, math.ceil(min(one.cost for one in purchases) / candidate.price) - 1)
            workers = self._fewest(candidate, objective_ms, most)
            if workers:
                purchases.append(self._purchase(candidate, workers, objective_ms))
        return purchases

    def _fewest(self, candidate: Candidate, objective_ms: float, most: int) -> int:
        """The fewest workers that hold, at most so many; 0: none do."""
        low = high = self._least(candidate)
        # One simulation tells whether a candidate can be cheaper than the best one so far.
        if low > most or (most < candidate.most and not self._holds(candidate, most, objective_ms)):
            return 0
        # In growing steps from below: many workers take longest to simulate.
        step = 1
        while not self._holds(candidate, high, objective_ms):
            if high >= most:
                return 0
            low, high, step = high + 1, min(high + step, most), 2 * step
        while low < high:
            middle = (low + high) // 2
            if self._holds(candidate, middle, objective_ms):
                high = middle
            else:
                low = middle + 1
        return high

    def _least(self, candidate: Candidate) -> int:
        """Fewer workers cannot keep up, however the texts are divided: each takes its share of a full call at least."""
        spent_ms = candidate.system.least_ms(self._trace.length)
        seconds = max(float(self._trace.at_s[-1]), 1e-9)
        # The load of a short trace may be borne later.
        return max(1, math.floor(spent_ms / 1e3 / (seconds + self._case.objective.latency_ms / 1e3)))

    def _holds(self, candidate: Candidate, workers: int, objective_ms: float) -> bool:
        return self._judge(candidate, workers, objective_ms)[0] >= self._case.objective.share

    def _purchase(self, candidate: Candidate, workers: int, objective_ms: float) -> Purchase:
        return Purchase(candidate, workers, *self._judge(candidate, workers, objective_ms))

    def _judge(self, candidate: Candidate, workers: int, objective_ms: float) -> tuple[float, float]:
        """The share of texts in time, and the latency that the objective's share of them has at most."""
        place = self._case.candidates.index(candidate)
        if (place, workers, objective_ms) in self._tried:
            return self._tried[place, workers, objective_ms]
        words = " ".join(map(str, candidate.described.values()))
        self._progress(f"{objective_ms:.0f} ms: {workers} workers, {words}")
        # However long the queue is: what waits too long is counted.
        changed = {"queue_rows": "1000000000", "max_queue_ms": "0", "slo_ms": f"{objective_ms:g}"}
        served = candidate.system.with_parameters(changed).run(self._trace, workers=workers)
        timely = in_time(served.latency_ms, self._trace, objective_ms)
        latencies = np.nan_to_num(served.latency_ms, nan=np.inf)
        tail_ms = float(np.quantile(latencies, self._case.objective.share, method="higher"))
        self._tried[place, workers, objective_ms] = float(timely.mean()), tail_ms
        return self._tried[place, workers, objective_ms]

    def _refuse(self, objective_ms: float) -> None:
        ends = [self._purchase(one, one.most, objective_ms) for one in self._case.candidates]
        nearest = min(ends, key=lambda one: one.tail_ms)
        limit_ms = nearest.tail_ms
        # With another objective bins are divided in another way.
        for _ in range(_NEAREST_TRIES):
            if math.isfinite(limit_ms) and self._holds(nearest.candidate, nearest.workers, limit_ms):
                break
            limit_ms *= _NEAREST_STEP
        where = f"{nearest.workers} workers of {nearest.candidate.kind}, {nearest.candidate.placement}"
        share = f"{self._case.objective.share:.1%} of the texts"
        if not math.isfinite(limit_ms):
            raise ShapeshiftError("[slo]: nothing bears the load; `most` workers of each kind are too few")
        text = f"nothing holds it; the nearest that holds is {limit_ms:.1f} ms for {share}, with {where}"
        raise InvalidInputError("[slo] latency_ms", objective_ms, text)


def as_json(answer: Answer) -> dict[str, object]:
    """The answer as JSON values, with the parameters of the front to buy."""
    best = answer.best
    parameters = {"placement": best.candidate.placement, "workers": best.workers, "dispatch": best.candidate.dispatch}
    curve = [{"latency_ms": ms, **({} if one is None else one.row())} for ms, one in answer.curve]
    return {
        "best": best.row(),
        "parameters": {**parameters, "bins": ",".join(map(str, best.candidate.system.edges))},
        "others": [one.row() for one in answer.others],
        "curve": curve,
    }
