"""Evictions against the rules written out, and against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shapeshift.adapter_cache.evict import ALGORITHMS, FAIR, PAPER, EvictEntry, choose
from shapeshift.errors import InvalidInputError


def entries(rng: random.Random, count: int) -> list[EvictEntry]:
    return [
        EvictEntry(
            id=f"a{number}",
            size=rng.choice((8, 16, 32, 64, 128)),
            freq=rng.randint(0, 5),
            last=float(rng.randint(0, 4)),
            rc=int(rng.random() < 0.2),
            queued=rng.random() < 0.3,
            pinned=rng.random() < 0.1,
            base=rng.random(),
        )
        for number in range(count)
    ]


def worth(one: EvictEntry, among: list[EvictEntry], now: float, algorithm: str) -> float:
    """POLICY's formulas, entry by entry."""
    if algorithm == "gdsf":
        return one.base + one.freq / one.size
    if algorithm in ("lru", "lfu"):
        return one.last if algorithm == "lru" else one.freq
    frequency, recency, size = PAPER if algorithm == "score" else FAIR
    most, largest = max(each.freq for each in among), max(each.size for each in among)
    oldest = max(now - each.last for each in among)
    return (
        frequency * (one.freq / most if most else 0)
        + recency * (1 - (now - one.last) / oldest if oldest else 1)
        + size * one.size / largest
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_always_the_one_of_least_worth_goes_next(algorithm: str) -> None:
    rng = random.Random(1)
    nulls = 0
    for _ in range(300):
        given = entries(rng, rng.randint(1, 12))
        need, now = rng.randint(1, 300), 5.0
        evicted, _ = choose(given, need, 0.0, algorithm, now)
        left = [one for one in given if not one.rc and not one.pinned]
        if evicted is None:
            nulls += 1
            assert sum(one.size for one in left) < need
            continue
        known = {one.id: one for one in given}
        freed = 0.0
        for name in evicted:
            assert freed < need
            best = min(left, key=lambda one: (one.queued, worth(one, given, now, algorithm), one.last, one.id))
            assert name == best.id
            left.remove(best)
            freed += known[name].size
        assert freed >= need
    assert 0 < nulls < 300


def test_the_greedy_dual_clock_follows_the_last_evicted() -> None:
    given = [EvictEntry("a", 10, 5, 0), EvictEntry("b", 10, 1, 0), EvictEntry("c", 10, 3, 0, base=9.0)]
    assert choose(given, 15, 0.25) == (["b", "a"], 0.5)
    assert choose(given, 31, 0.25) == (None, 0.25)
    assert choose(given, 15, 0.25, "lru") == (["a", "b"], 0.25)
    assert choose(given, 0, 0.25) == ([], 0.25) and choose([], -3, 0.25) == ([], 0.25)
    assert choose([], 1, 0.25) == (None, 0.25)


def test_the_papers_score_sends_the_small_ones_first_and_greedy_dual_the_large() -> None:
    small, large = EvictEntry("small", 8, 4, 1.0), EvictEntry("large", 128, 4, 1.0)
    assert choose([small, large], 1, 0.0, "score", 2.0)[0] == ["small"]
    assert choose([small, large], 1, 0.0, "gdsf", 2.0)[0] == ["large"]


def test_ties_go_to_the_older_then_the_lesser_id() -> None:
    same = EvictEntry("b", 8, 1, 3.0)
    assert choose([same, replace(same, id="a"), replace(same, id="c", last=2.0)], 24)[0] == ["c", "a", "b"]


def test_what_holds_nothing_is_worth_nothing_to_evict() -> None:
    empty = EvictEntry("empty", 0, 0, 0.0)
    for algorithm in ALGORITHMS:
        assert choose([empty], 1, 0.0, algorithm, 0.0) == (None, 0.0)
    assert choose([empty, EvictEntry("b", 4, 1, 1.0)], 4)[0] == ["b"]


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(InvalidInputError, match="algorithm: got 'belady'; one of gdsf, score, lru, lfu, fair"):
        choose([], 1, 0.0, "belady")
