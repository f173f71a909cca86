"""Which slots move so that the occupied ones are contiguous again (Flover, Algorithm 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Compaction:
    """`moves` are (source, target) pairs into the window that begins at `offset`; `cost` is the weight moved."""

    offset: int
    cost: float
    moves: tuple[tuple[int, int], ...]


def compact(weights: Sequence[float]) -> Compaction:
    """The window, as wide as there are occupied slots, that leaves the least weight outside it.

    weights: one for each slot, 0 where it is free. Of equally good windows the first is chosen. Sources in ascending
    order go to holes in ascending order; the two are disjoint, so the copies can run in any order.

    The printed algorithm starts at the second window and never considers offset 0. Here the first window counts too,
    which makes the number of moves minimal.
    """
    occupied = [slot for slot, weight in enumerate(weights) if weight]
    width = len(occupied)
    upto = [0, *accumulate(weights)]
    offset = max(range(len(weights) - width + 1), key=lambda start: upto[start + width] - upto[start])
    window = range(offset, offset + width)
    holes = (slot for slot in window if not weights[slot])
    moves = tuple(zip((slot for slot in occupied if slot not in window), holes, strict=True))
    return Compaction(offset, sum(weights[source] for source, _ in moves), moves)
