"""How many workers of one front hold each bin: its demand, and the solution of Arlo's allocation problem for it.

Arlo, section 3.3: each period the problem is solved for the lengths that arrived in the last period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapeshift.errors import UnsupportedError
from shapeshift.polymorph.policy import problem as allocation
from shapeshift.polymorph.policy.allocate import allocate
from shapeshift.polymorph.policy.curves import Clamped
from shapeshift.polymorph.policy.problem import Problem
from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.observe import Traffic

_BISECTIONS = 8
# Share of the workers' capacity that the first plan assumes to be in use, before any traffic.
ASSUMED_UTILIZATION = 0.7
# A new plan must improve the mean latency by at least this share: a change costs loads.
MIN_GAIN = 0.01


@dataclass(frozen=True)
class Solution:
    """Workers by bin, for one demand.

    mean_ms: expected mean latency, None without demand. feasible: whether all of the demand is served within the
    latency objective. reason: what is wrong, else empty.
    """

    counts: tuple[int, ...]
    mean_ms: float | None
    feasible: bool
    reason: str


def horizon_ms(front: Front) -> float:
    """The time for which demand and capacity are counted: the latency objective, or one text if that takes longer."""
    return max(front.settings.slo_ms, *front.service_ms)


def observed_demand(front: Front, traffic: Traffic) -> tuple[float, ...]:
    """Texts of each bin within the horizon, at the rate of `traffic`. Longer texts count in the last bin."""
    counts = [0.0] * len(front.edges)
    for bound, texts in traffic.texts.items():
        index = next((index for index, edge in enumerate(front.edges) if edge >= bound), len(counts) - 1)
        counts[index] += texts
    scale = horizon_ms(front) / (1000.0 * traffic.seconds)
    return tuple(scale * count for count in counts)


def backlog_demand(front: Front, traffic: Traffic, bins: Mapping[str, int]) -> tuple[float, ...]:
    """The texts that wait for the workers `bins` (worker: bin), as demand."""
    outstanding = (
        (front.edges.index(fitting_bin(front, bin_)), traffic.outstanding.get(name, 0)) for name, bin_ in bins.items()
    )
    share = horizon_ms(front) / (1000.0 * traffic.seconds)
    return tuple(allocation.backlog(outstanding, len(front.edges), share, front.settings.curve))


def assumed_demand(front: Front, workers: int, utilization: float = ASSUMED_UTILIZATION) -> tuple[float, ...]:
    """The demand of the configured histogram at `utilization` of the greatest load that the workers can serve.

    If they cannot serve a mix of all bins at any load: at `utilization` of the workers' time.
    """
    mean_service_ms = sum(weight * service for weight, service in zip(front.weights, front.service_ms, strict=True))
    full = workers * horizon_ms(front) / mean_service_ms

    def demand_at(share: float) -> tuple[float, ...]:
        return tuple(share * full * weight for weight in front.weights)

    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        solution = solve(front, workers, demand_at(middle))
        served = solution.feasible and solution.mean_ms is not None and solution.mean_ms <= horizon_ms(front)
        low, high = (middle, high) if served else (low, middle)
    return demand_at(utilization * (low or 1.0))


def allocation_problem(front: Front, workers: int, demand: Sequence[float]) -> Problem:
    """The allocation problem with the front's latency curve."""
    return allocation.of_services(workers, demand, front.service_ms, horizon_ms(front), front.settings.curve)


def solve(front: Front, workers: int, demand: Sequence[float]) -> Solution:
    """The best counts for `workers` workers. If the configured solver is unavailable, the exact one is used."""
    problem = allocation_problem(front, workers, demand)
    reasons = []
    try:
        result = allocate(problem, front.settings.allocation)
    except UnsupportedError as error:
        result = allocate(problem, "exact")
        reasons.append(f"solved with allocation exact: {error}")
    if not result.feasible:
        reasons.append(_shortage(front, workers, result.theta))
    if front.settings.slo_ms < max(front.service_ms):
        reasons.append(f"one text of {front.edges[-1]} tokens takes longer than slo_ms ({front.settings.slo_ms:g})")
    total = result.theta * sum(demand)
    return Solution(
        counts=result.counts,
        mean_ms=result.objective / total if total > 0 else None,
        feasible=result.feasible,
        reason="; ".join(reasons),
    )


def expected_ms(front: Front, counts: Sequence[int], demand: Sequence[float]) -> float | None:
    """The mean latency that these counts give in the problem that `solve` solves; None without demand or last bin."""
    if counts[-1] < 1:
        return None
    problem, _ = allocation_problem(front, sum(counts), demand).shrunk()
    total = sum(problem.demand)
    return problem.objective(counts) / total if total > 0 else None


def is_better(front: Front, new: Solution, current: Sequence[int], demand: Sequence[float]) -> bool:
    """Whether the solution is worth a change from the counts `current` of the same number of workers."""
    if tuple(current) == new.counts:
        return False
    before = expected_ms(front, current, demand)
    if before is None or new.mean_ms is None:
        return current[-1] < 1
    if new.feasible and not allocation_problem(front, sum(current), demand).met_by(current):
        return True
    return new.mean_ms < before * (1.0 - MIN_GAIN)


def counts_of(front: Front, bins: Mapping[str, int]) -> tuple[int, ...]:
    """How many of the workers `bins` (worker: bin) hold each bin; see `fitting_bin`."""
    held = [fitting_bin(front, bin_) for bin_ in bins.values()]
    return tuple(held.count(edge) for edge in front.edges)


def fitting_bin(front: Front, tokens: int) -> int:
    """The shortest bin that takes texts of `tokens` tokens; the longest bin if none does."""
    return next((edge for edge in front.edges if edge >= tokens), front.edges[-1])


def format_counts(front: Front, counts: Sequence[int]) -> str:
    """Counts as `2 x 64, 1 x 512`."""
    if not front.is_binned:
        return f"{sum(counts)} with all bins"
    return ", ".join(f"{count} x {edge}" for edge, count in zip(front.edges, counts, strict=True) if count) or "none"


def format_demand(front: Front, demand: Sequence[float]) -> str:
    """The shares of the bins as `64: 80%, 512: 20%`."""
    total = sum(demand)
    parts = zip(front.edges, demand, strict=True)
    return ", ".join(f"{edge}: {100 * texts / total:.0f}%" for edge, texts in parts if texts > 0.005 * total)


def warm_up() -> None:
    """Load the solver, so that the first plan does not wait for it."""
    allocate(Problem(2, (1.0, 1.0), (2.0, 2.0), (Clamped(1.0), Clamped(1.0))))


def _shortage(front: Front, workers: int, theta: float) -> str:
    if theta == 1.0 and front.settings.allocation == "even":
        return "the counts of allocation even do not fit this demand"
    share = f"{100 * theta:.0f}% of the demand" if theta < 1.0 else "all but some of the longest texts"
    return f"{workers} workers serve {share} within {front.settings.slo_ms:g} ms: use more workers"
