"""Which cached adapters are evicted (Chameleon, section 4.1, and the rules that the paper compares with)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EvictEntry:
    """A resident adapter as an eviction rule sees it.

    id      a name; or a number, if all ids are numbers
    size    bytes
    freq    number of uses
    last    time of the last use
    rc      running requests that use it
    queued  whether a request waits for it
    pinned  whether it must stay
    base    clock of the `gdsf` rule at the last use
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
"""The priority of each entry at a given time; the lowest is evicted first."""

PAPER = (0.45, 0.10, 0.45)
FAIR = (1 / 3, 1 / 3, 1 / 3)


@dataclass(frozen=True)
class RankedEviction:
    """Evicts the idle entries of the lowest rank.

    has_clock     whether the evicted entries advance the gdsf clock
    keeps_unused  whether an entry stays that no request uses or waits for
    """

    rank: Ranking
    has_clock: bool = False
    keeps_unused: bool = True

    def choose(
        self, entries: Sequence[EvictEntry], need: float, clock: float = 0.0, now: float | None = None
    ) -> tuple[list[str] | None, float]:
        """The ids to evict, in order, until `need` bytes are free, and the new gdsf clock.

        clock: the caller sets `base` of an entry to it at each use. now: None for the latest use; it only matters to
        `score` and `fair`. Entries that are in use or pinned stay. Queued entries go after all others. Ties go to the
        older use, then to the lower id. Returns None and the old clock if `need` cannot be met.
        """
        if need <= 0:
            return [], clock
        now = max((entry.last for entry in entries), default=0.0) if now is None else now
        ranks = self.rank(entries, now)
        idle = [(entry, rank) for entry, rank in zip(entries, ranks, strict=True) if not entry.rc and not entry.pinned]
        idle.sort(key=lambda pair: (pair[0].queued, pair[1], pair[0].last, pair[0].id))
        evicted: list[str] = []
        freed = 0.0
        for entry, rank in idle:
            evicted.append(entry.id)
            freed += entry.size
            if freed >= need:
                return evicted, rank if self.has_clock else clock
        return None, clock


def _gdsf(entries: Sequence[EvictEntry], now: float) -> list[float]:
    """Greedy-Dual-Size-Frequency: a load costs as much as its size, so what counts is uses per byte, and age."""
    return [entry.base + (entry.freq / entry.size if entry.size else math.inf) for entry in entries]


def _lru(entries: Sequence[EvictEntry], now: float) -> list[float]:
    return [entry.last for entry in entries]


def _lfu(entries: Sequence[EvictEntry], now: float) -> list[float]:
    return [entry.freq for entry in entries]


def _weighted(weights: tuple[float, float, float]) -> Ranking:
    """The paper's score with `weights` of frequency, recency and size, each relative to its maximum."""
    by_frequency, by_recency, by_size = weights

    def rank(entries: Sequence[EvictEntry], now: float) -> list[float]:
        max_freq = max((entry.freq for entry in entries), default=0.0)
        max_age = max((now - entry.last for entry in entries), default=0.0)
        max_size = max((entry.size for entry in entries), default=0.0)
        return [
            by_frequency * (entry.freq / max_freq if max_freq else 0.0)
            + by_recency * (1 - (now - entry.last) / max_age if max_age > 0 else 1.0)
            + by_size * (entry.size / max_size if max_size else 0.0)
            for entry in entries
        ]

    return rank


GDSF = RankedEviction(_gdsf, has_clock=True)
SCORE = RankedEviction(_weighted(PAPER))
LRU = RankedEviction(_lru)
LFU = RankedEviction(_lfu)
FAIR_SCORE = RankedEviction(_weighted(FAIR))
UNUSED = RankedEviction(_gdsf, has_clock=True, keeps_unused=False)
"""No cache, as in S-LoRA."""
