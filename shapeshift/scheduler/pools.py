"""How the workers of a pool are divided among its fronts: by the workers' time that each one's demand asks for.

The paper (Arlo, section 6) only sketches several request streams on one cluster. Here each front is solved
alone for the whole pool, the pool is split by what those solutions ask for, and each is solved for its share.
"""

from __future__ import annotations

from collections.abc import Sequence

# A front's share stays while what it should get is nearer than this to it: half a worker, and something for noise.
_STAYS = 0.75


def split(
    total: int,
    asked: Sequence[float],
    least: Sequence[int],
    most: Sequence[int],
    have: Sequence[int] | None = None,
) -> list[int]:
    """Workers of each front: `total` divided in proportion to `asked`, within the bounds of each.

    asked: workers' time that each front's demand takes, >= 0; equal shares where all are 0. have: the present
    shares, kept while none is far from its proportion. Sums to `total`, but for what all `most` together cannot
    take; where `least` do not fit, they are divided in their own proportion, so far as there are workers one each.
    Raises ValueError naming the field.
    """
    if total < 1:
        raise ValueError(f"total: got {total}; at least 1")
    if not len(asked) == len(least) == len(most) > 0:
        raise ValueError(f"asked: got {len(asked)} values; as many as least and most have, at least 1")
    if any(not 0 <= value < float("inf") for value in asked):
        raise ValueError(f"asked: got {list(asked)}; numbers of at least 0")
    if any(not 0 <= low <= high for low, high in zip(least, most, strict=True)):
        raise ValueError(f"least: got {list(least)}; 0 to most ({list(most)})")
    if sum(least) > total:
        floor = [min(1, low) for low in least]
        if sum(floor) > total:
            floor = [0] * len(least)
        return _whole(_bounded(total, list(map(float, least)), floor, least), floor, list(least), total)
    total = min(total, sum(most))
    weights = list(asked) if sum(asked) > 0 else [1.0] * len(asked)
    ideal = _bounded(total, weights, least, most)
    if have is not None and sum(have) == total and _stays(have, ideal, least, most):
        return list(have)
    return _whole(ideal, least, most, total)


def _bounded(total: int, weights: Sequence[float], least: Sequence[int], most: Sequence[int]) -> list[float]:
    """Real shares that sum to `total`: min(max(scale x weight, least), most) with the scale that fits."""

    def shares(scale: float) -> list[float]:
        return [min(max(scale * weight, low), high) for weight, low, high in zip(weights, least, most, strict=True)]

    low, high = 0.0, 1.0
    limit = sum(top if weight > 0 else bottom for weight, bottom, top in zip(weights, least, most, strict=True))
    while sum(shares(high)) < min(total, limit) and high < 1e300:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if sum(shares(middle)) < total:
            low = middle
        else:
            high = middle
    found = shares(high)
    # Fronts that ask for nothing take what the others may not have.
    for index, top in enumerate(most):
        found[index] = min(found[index] + max(total - sum(found), 0.0), top)
    return found


def _whole(ideal: Sequence[float], least: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Whole shares by the largest remainders, within the bounds."""
    found = [min(max(int(share + 1e-9), low), high) for share, low, high in zip(ideal, least, most, strict=True)]
    order = sorted(range(len(found)), key=lambda index: (found[index] - ideal[index], index))
    while sum(found) < total and any(found[index] < most[index] for index in order):
        for index in order:
            if sum(found) < total and found[index] < most[index]:
                found[index] += 1
    return found


def _stays(have: Sequence[int], ideal: Sequence[float], least: Sequence[int], most: Sequence[int]) -> bool:
    inside = all(low <= count <= high for count, low, high in zip(have, least, most, strict=True))
    return inside and all(abs(count - share) < _STAYS for count, share in zip(have, ideal, strict=True))
