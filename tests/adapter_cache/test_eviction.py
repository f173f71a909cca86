"""Eviction rules against their formulas, and against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shapeshift.adapter_cache.policy.eviction import FAIR, GDSF, LRU, PAPER, SCORE, EvictEntry
from shapeshift.adapter_cache.settings import EVICTION_RULES, UNUSED
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


def rank(one: EvictEntry, among: list[EvictEntry], now: float, algorithm: str) -> float:
    """The formulas of the rules, entry by entry."""
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


@pytest.mark.parametrize("algorithm", [name for name in EVICTION_RULES if name != UNUSED])
def test_the_entry_of_the_lowest_rank_is_evicted_next(algorithm: str) -> None:
    rng = random.Random(1)
    nulls = 0
    for _ in range(300):
        given = entries(rng, rng.randint(1, 12))
        need, now = rng.randint(1, 300), 5.0
        evicted, _ = EVICTION_RULES[algorithm].choose(given, need, 0.0, now)
        left = [one for one in given if not one.rc and not one.pinned]
        if evicted is None:
            nulls += 1
            assert sum(one.size for one in left) < need
            continue
        by_id = {one.id: one for one in given}
        freed = 0.0
        for name in evicted:
            assert freed < need
            best = min(left, key=lambda one: (one.queued, rank(one, given, now, algorithm), one.last, one.id))
            assert name == best.id
            left.remove(best)
            freed += by_id[name].size
        assert freed >= need
    assert 0 < nulls < 300


def test_the_greedy_dual_clock_follows_the_last_evicted() -> None:
    given = [EvictEntry("a", 10, 5, 0), EvictEntry("b", 10, 1, 0), EvictEntry("c", 10, 3, 0, base=9.0)]
    assert GDSF.choose(given, 15, 0.25) == (["b", "a"], 0.5)
    assert GDSF.choose(given, 31, 0.25) == (None, 0.25)
    assert LRU.choose(given, 15, 0.25) == (["a", "b"], 0.25)
    assert GDSF.choose(given, 0, 0.25) == ([], 0.25) and GDSF.choose([], -3, 0.25) == ([], 0.25)
    assert GDSF.choose([], 1, 0.25) == (None, 0.25)


def test_the_papers_score_evicts_small_adapters_first_and_greedy_dual_large_ones() -> None:
    small, large = EvictEntry("small", 8, 4, 1.0), EvictEntry("large", 128, 4, 1.0)
    assert SCORE.choose([small, large], 1, 0.0, 2.0)[0] == ["small"]
    assert GDSF.choose([small, large], 1, 0.0, 2.0)[0] == ["large"]


def test_ties_go_to_the_older_then_the_lesser_id() -> None:
    same = EvictEntry("b", 8, 1, 3.0)
    assert GDSF.choose([same, replace(same, id="a"), replace(same, id="c", last=2.0)], 24)[0] == ["c", "a", "b"]


def test_evicting_an_empty_entry_frees_nothing() -> None:
    empty = EvictEntry("empty", 0, 0, 0.0)
    for algorithm in EVICTION_RULES:
        assert EVICTION_RULES[algorithm].choose([empty], 1, 0.0, 0.0) == (None, 0.0)
    assert GDSF.choose([empty, EvictEntry("b", 4, 1, 1.0)], 4)[0] == ["b"]


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(InvalidInputError, match="eviction: got 'belady'; one of gdsf, score, lru, lfu, fair"):
        EVICTION_RULES["belady"]
