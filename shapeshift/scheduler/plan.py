"""Which bin each worker of one front should hold: demand, solution, and the reason in words.

Arlo, section 3.3: the allocation problem is solved each period for the lengths that came in the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapeshift.errors import UnsupportedError
from shapeshift.polymorph import problem as allocation
from shapeshift.polymorph.allocate import allocate
from shapeshift.polymorph.curves import Clamped
from shapeshift.polymorph.problem import Problem
from shapeshift.scheduler.front import Front
from shapeshift.scheduler.observe import Load

_BISECTIONS = 8


@dataclass(frozen=True)
class Solution:
    """counts: workers by bin; mean_ms: latency that the problem expects of them, None without demand;
    asked: workers whose whole time the demand takes when it is served so; feasible: whether all of it is served
    within the objective; reason: in words, empty where all is as it should be.
    """

    counts: tuple[int, ...]
    mean_ms: float | None
    asked: float
    feasible: bool
    reason: str


def horizon_ms(front: Front) -> float:
    """The time in which demand and capacity are counted: the objective, or one text where that takes longer."""
    return max(front.settings.slo_ms, *front.services)


def demand(front: Front, load: Load) -> tuple[float, ...]:
    """Texts of each bin within the horizon, at the rate of `load`; longer ones than the last edge belong to it."""
    counts = [0.0] * len(front.edges)
    for bound, texts in load.texts.items():
        index = next((index for index, edge in enumerate(front.edges) if edge >= bound), len(counts) - 1)
        counts[index] += texts
    scale = horizon_ms(front) / (1000.0 * load.seconds)
    return tuple(scale * count for count in counts)


def backlog(front: Front, load: Load, have: Mapping[str, int]) -> tuple[float, ...]:
    """What waits for the workers `have` (worker: bin), as demand: texts within the horizon, `drain` times a period."""
    held = ((front.edges.index(fitting(front, bin_)), load.outstanding.get(name, 0)) for name, bin_ in have.items())
    times = front.settings.drain * horizon_ms(front) / (1000.0 * load.seconds)
    return tuple(allocation.backlog(held, len(front.edges), times))


def assumed_demand(front: Front, workers: int, share: float) -> tuple[float, ...]:
    """The demand of the configured histogram at `share` of the greatest load that these workers can serve.

    Where they cannot serve a mix of all bins at any load, `share` of the workers' time.
    """
    spent = sum(weight * service for weight, service in zip(front.weights, front.services, strict=True))
    all_time = workers * horizon_ms(front) / spent

    def at(load: float) -> tuple[float, ...]:
        return tuple(load * all_time * weight for weight in front.weights)

    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        found = solve(front, workers, at(middle))
        served = found.feasible and found.mean_ms is not None and found.mean_ms <= horizon_ms(front)
        low, high = (middle, high) if served else (low, middle)
    return at(share * (low or 1.0))


def problem(front: Front, workers: int, wanted: Sequence[float]) -> Problem:
    """The allocation problem on the front's curve."""
    own = front.settings
    return allocation.of_services(workers, wanted, front.services, horizon_ms(front), own.curve, own.cap_last)


def solve(front: Front, workers: int, wanted: Sequence[float]) -> Solution:
    """The best counts for so many workers. A solver that cannot be used is replaced by the exact one, and said."""
    stated = problem(front, workers, wanted)
    said = []
    try:
        found = allocate(stated, front.settings.allocation)
    except UnsupportedError as error:
        found = allocate(stated, "exact")
        said.append(f"solved exactly: {error}")
    if not found.feasible:
        said.append(_shortage(front, workers, found.theta))
    if front.settings.slo_ms < max(front.services):
        said.append(f"one text of {front.edges[-1]} tokens takes longer than slo_ms ({front.settings.slo_ms:g})")
    total = found.theta * sum(wanted)
    return Solution(
        counts=found.counts,
        mean_ms=found.objective / total if total > 0 else None,
        asked=_asked(front, stated, found.counts),
        feasible=found.feasible,
        reason="; ".join(said),
    )


def expected_ms(front: Front, counts: Sequence[int], wanted: Sequence[float]) -> float | None:
    """The mean latency that the problem expects of these counts, for what `solve` would solve; None for nothing."""
    if counts[-1] < 1:
        return None
    stated, _ = problem(front, sum(counts), wanted).shrunk()
    total = sum(stated.demand)
    return stated.objective(counts) / total if total > 0 else None


def is_better(front: Front, new: Solution, have: Sequence[int], wanted: Sequence[float], least_gain: float) -> bool:
    """Whether the solution is worth a change from the counts `have` of as many workers."""
    if tuple(have) == new.counts:
        return False
    before = expected_ms(front, have, wanted)
    if before is None or new.mean_ms is None:
        return have[-1] < 1
    if new.feasible and not problem(front, sum(have), wanted).met_by(have):
        return True
    return new.mean_ms < before * (1.0 - least_gain)


def in_words(front: Front, counts: Sequence[int]) -> str:
    """Counts as `2 x 64, 1 x 512`."""
    if not front.is_binned:
        return f"{sum(counts)} with all bins"
    return ", ".join(f"{count} x {edge}" for edge, count in zip(front.edges, counts, strict=True) if count) or "none"


def shares(front: Front, wanted: Sequence[float]) -> str:
    """The demand's shape as `64: 80%, 512: 20%`."""
    total = sum(wanted)
    parts = zip(front.edges, wanted, strict=True)
    return ", ".join(f"{edge}: {100 * texts / total:.0f}%" for edge, texts in parts if texts > 0.005 * total)


def counts_of(front: Front, have: Mapping[str, int]) -> tuple[int, ...]:
    """How many of the workers hold each bin; a bin that is none counts as the next longer one."""
    held = [fitting(front, bin_) for bin_ in have.values()]
    return tuple(held.count(edge) for edge in front.edges)


def fitting(front: Front, tokens: int) -> int:
    """The bin that texts of so many tokens belong to."""
    return next((edge for edge in front.edges if edge >= tokens), front.edges[-1])


def _asked(front: Front, stated: Problem, counts: Sequence[int]) -> float:
    served = stated.served(counts)
    return sum(texts * service for texts, service in zip(served, front.services, strict=True)) / horizon_ms(front)


def _shortage(front: Front, workers: int, theta: float) -> str:
    if theta < 1.0:
        share = f"{100 * theta:.0f}% of the demand"
    elif front.settings.allocation == "even":
        return "even counts are not made for this demand"
    else:
        share = "all but some of the longest texts"
    return f"{workers} workers serve {share} within {front.settings.slo_ms:g} ms: allow more of them"


def warm_up() -> None:
    """Load the solver, so that the first plan need not wait for it."""
    allocate(Problem(2, (1.0, 1.0), (2.0, 2.0), (Clamped(1.0), Clamped(1.0))))
