"""Which cached adapters make room (Chameleon, section 4.1, and the policies that it is compared with)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shapeshift.errors import InvalidInputError


@dataclass(frozen=True)
class EvictEntry:
    """A resident adapter.

    id      a name; or a number, where all of them are
    size    bytes
    freq    how often it was used
    last    when it was last used
    rc      running requests that use it
    queued  whether a request for it waits
    pinned  whether it must stay
    base    gdsf's clock as it was at the last use
    """

    id: str
    size: float
    freq: float
    last: float
    rc: int = 0
    queued: bool = False
    pinned: bool = False
    base: float = 0.0


Ranking = Callable[[Sequence[EvictEntry], float], list[float]]
"""The worth of each entry at an instant; what is worth least is evicted first."""

PAPER = (0.45, 0.10, 0.45)
FAIR = (1 / 3, 1 / 3, 1 / 3)


def _gdsf(entries: Sequence[EvictEntry], now: float) -> list[float]:
    """Greedy-Dual-Size-Frequency: a load costs by its size, so that what counts is uses a byte and age."""
    return [one.base + (one.freq / one.size if one.size else math.inf) for one in entries]


def _lru(entries: Sequence[EvictEntry], now: float) -> list[float]:
    return [one.last for one in entries]


def _lfu(entries: Sequence[EvictEntry], now: float) -> list[float]:
    return [one.freq for one in entries]


def _weighted(weights: tuple[float, float, float]) -> Ranking:
    """The paper's score with `weights` of frequency, recency and size, each relative to the greatest."""
    by_frequency, by_recency, by_size = weights

    def rank(entries: Sequence[EvictEntry], now: float) -> list[float]:
        frequent = max((one.freq for one in entries), default=0.0)
        old = max((now - one.last for one in entries), default=0.0)
        large = max((one.size for one in entries), default=0.0)
        return [
            by_frequency * (one.freq / frequent if frequent else 0.0)
            + by_recency * (1 - (now - one.last) / old if old > 0 else 1.0)
            + by_size * (one.size / large if large else 0.0)
            for one in entries
        ]

    return rank


ALGORITHMS: dict[str, Ranking] = {
    "gdsf": _gdsf,
    "score": _weighted(PAPER),
    "lru": _lru,
    "lfu": _lfu,
    "fair": _weighted(FAIR),
}
"""The first named is the default."""


def choose(
    entries: Sequence[EvictEntry],
    need: float,
    clock: float = 0.0,
    algorithm: str = "gdsf",
    now: float | None = None,
) -> tuple[list[str] | None, float]:
    """Who is evicted, in order, until `need` bytes are free, and gdsf's clock from then on.

    clock: gdsf's; the caller sets an entry's `base` to it at each use. now: None for the last use of all; counts
    for `score` and `fair` alone. Entries that are used or pinned stay; those that are queued go after all others;
    of equals the one used longer ago, then the lesser id. None and the clock as it was where `need` cannot be met.
    Raises InvalidInputError for an unknown algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise InvalidInputError("algorithm", algorithm, f"one of {', '.join(ALGORITHMS)}")
    if need <= 0:
        return [], clock
    instant = max((one.last for one in entries), default=0.0) if now is None else now
    worths = ALGORITHMS[algorithm](entries, instant)
    free = [(one, worth) for one, worth in zip(entries, worths, strict=True) if not one.rc and not one.pinned]
    free.sort(key=lambda pair: (pair[0].queued, pair[1], pair[0].last, pair[0].id))
    evicted: list[str] = []
    freed = 0.0
    for one, worth in free:
        evicted.append(one.id)
        freed += one.size
        if freed >= need:
            return evicted, worth if algorithm == "gdsf" else clock
    return None, clock
