"""How many workers each front gets: its own, or its share of a pool that several fronts use.

The paper (Arlo, section 6) only sketches several request streams on one cluster. Here each front is solved
alone for the whole pool, the pool is divided in proportion to the workers that these solutions keep busy, and each
front is solved again for its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.observe import Traffic
from shapeshift.sidecar.policy import plan
from shapeshift.sidecar.workers import ServerModels

# A share is kept while it differs from its proportion by less than this: half a worker, plus a margin for noise.
_KEPT_DEVIATION = 0.75
# A period with fewer texts than this says too little about their lengths, and changes no plan.
MIN_TEXTS = 50


@dataclass(frozen=True)
class FrontPeriod:
    """One front at the end of a period.

    current: the bin of each of its workers; spare: worker models that can be loaded; models: number of its worker
    models; target: how many workers it should have, unless it shares a pool; 0: as many as now.
    """

    front: Front
    current: Mapping[str, int]
    spare: Sequence[str]
    traffic: Traffic
    models: int
    target: int = 0


def group_fronts(fronts: Iterable[Front]) -> list[list[Front]]:
    """The fronts with workers; fronts of one pool form one group, every other front is one group."""
    groups: dict[tuple[str, str], list[Front]] = {}
    for front in fronts:
        if front.has_workers:
            pool = front.settings.worker_pool
            groups.setdefault(("pool", pool) if pool else ("front", front.name), []).append(front)
    return list(groups.values())


def initial_shares(group: Sequence[Front], server: ServerModels) -> dict[str, int]:
    """Workers of each front before any traffic: as configured, or the pool in proportion to that."""
    configured = [front.workers for front in group]
    if not group[0].settings.worker_pool:
        return {front.name: count for front, count in zip(group, configured, strict=True)}
    least, most = _bounds((front, len(server.workers[front.name])) for front in group)
    shares = split(_pool_size(group), configured, least, most)
    return {front.name: count for front, count in zip(group, shares, strict=True)}


def shares(periods: Sequence[FrontPeriod]) -> list[tuple[int, str]]:
    """Workers of each front of a group for the next period, with the reason."""
    fronts = [period.front for period in periods]
    if not fronts[0].settings.worker_pool:
        return [within_limits(one.front, one.target or len(one.current), one.models) for one in periods]
    size = _pool_size(fronts)
    least, most = _bounds((period.front, period.models) for period in periods)
    current = [len(period.current) for period in periods]
    busy = [_busy_workers(period, size) for period in periods]
    idle = sum(period.traffic.offered for period in periods) < MIN_TEXTS
    stays = idle and all(current) and sum(current) <= size
    counts = current if stays else split(size, busy, least, most, current)
    pool, total = fronts[0].settings.worker_pool, sum(busy)
    return [
        (share, f"pool {pool}: {demand:.1f} of {total:.1f} busy workers, {share} of {size} workers")
        for share, demand in zip(counts, busy, strict=True)
    ]


def within_limits(front: Front, workers: int, models: int) -> tuple[int, str]:
    """`workers` within the front's limits and its number of worker models, and what is wrong, if anything."""
    target = min(max(workers, front.min_workers), front.max_workers)
    if models >= target:
        return target, ""
    return models, f"{target} workers are needed, but there are only {models} worker models; run `shapeshift engines`"


def split(
    total: int,
    weights: Sequence[float],
    least: Sequence[int],
    most: Sequence[int],
    current: Sequence[int] | None = None,
) -> list[int]:
    """`total` workers divided in proportion to `weights`, within the bounds of each front.

    weights: >= 0; shares are equal if all are 0. current: the present shares; they are kept while each is close to
    its proportion. The result sums to `total`, or to the sum of `most` if that is less. If `least` does not fit, it is
    divided in its own proportion, one worker each as far as possible. Raises ValueError with the name of the argument.
    """
    if total < 1:
        raise ValueError(f"total: got {total}; must be at least 1")
    if not len(weights) == len(least) == len(most) > 0:
        raise ValueError(f"weights: got {len(weights)} values; must be as many as least and most have, at least 1")
    if any(not 0 <= value < float("inf") for value in weights):
        raise ValueError(f"weights: got {list(weights)}; must be at least 0")
    if any(not 0 <= low <= high for low, high in zip(least, most, strict=True)):
        raise ValueError(f"least: got {list(least)}; must be 0 to most ({list(most)})")
    if sum(least) > total:
        floor = [min(1, low) for low in least]
        if sum(floor) > total:
            floor = [0] * len(least)
        return _round(_scaled(total, list(map(float, least)), floor, least), floor, list(least), total)
    total = min(total, sum(most))
    ideal = _scaled(total, list(weights) if sum(weights) > 0 else [1.0] * len(weights), least, most)
    if current is not None and sum(current) == total and _is_close(current, ideal, least, most):
        return list(current)
    return _round(ideal, least, most, total)


def _busy_workers(period: FrontPeriod, pool_size: int) -> float:
    """How many workers the front's demand keeps busy, served as the solution for the whole pool serves it."""
    front = period.front
    if not front.edges:
        return 0.0
    if period.current:
        demand = plan.observed_demand(front, period.traffic)
    else:
        demand = plan.assumed_demand(front, front.workers)
    return plan.solve(front, pool_size, demand).busy_workers if sum(demand) > 0 else 0.0


def _bounds(fronts: Iterable[tuple[Front, int]]) -> tuple[list[int], list[int]]:
    """The least and the most workers of each front, given its number of worker models."""
    limits = [(front, min(front.max_workers, models)) for front, models in fronts]
    return [min(front.min_workers, most) for front, most in limits], [most for _, most in limits]


def _pool_size(group: Sequence[Front]) -> int:
    """The workers of the pool; if the fronts disagree, the smallest number."""
    return min(front.pool_workers for front in group)


def _scaled(total: int, weights: Sequence[float], least: Sequence[int], most: Sequence[int]) -> list[float]:
    """Real shares that sum to `total`: min(max(scale x weight, least), most) with the scale that fits."""

    def at(scale: float) -> list[float]:
        return [min(max(scale * weight, low), high) for weight, low, high in zip(weights, least, most, strict=True)]

    low, high = 0.0, 1.0
    limit = sum(top if weight > 0 else bottom for weight, bottom, top in zip(weights, least, most, strict=True))
    while sum(at(high)) < min(total, limit) and high < 1e300:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if sum(at(middle)) < total:
            low = middle
        else:
            high = middle
    scaled = at(high)
    # Fronts with weight 0 get what exceeds the bounds of the others.
    for index, top in enumerate(most):
        scaled[index] = min(scaled[index] + max(total - sum(scaled), 0.0), top)
    return scaled


def _round(ideal: Sequence[float], least: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Whole shares by the largest remainders, within the bounds."""
    rounded = [min(max(int(share + 1e-9), low), high) for share, low, high in zip(ideal, least, most, strict=True)]
    order = sorted(range(len(rounded)), key=lambda index: (rounded[index] - ideal[index], index))
    while sum(rounded) < total and any(rounded[index] < most[index] for index in order):
        for index in order:
            if sum(rounded) < total and rounded[index] < most[index]:
                rounded[index] += 1
    return rounded


def _is_close(current: Sequence[int], ideal: Sequence[float], least: Sequence[int], most: Sequence[int]) -> bool:
    inside = all(low <= count <= high for count, low, high in zip(current, least, most, strict=True))
    return inside and all(abs(count - share) < _KEPT_DEVIATION for count, share in zip(current, ideal, strict=True))
