"""Bin edges, compared with every possible set of edges, and the steps of a latency curve."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from shapeshift.polymorph.policy.bins import optimal_edges, step_ends


def total(
    edges: Sequence[int], hist: Sequence[float], latency: Sequence[float], dynamic: Sequence[float] | None = None
) -> float:
    """The total latency of all requests with these edges."""
    spent = 0.0
    low = 0
    for edge in edges:
        static = sum(hist[low:edge]) * latency[edge - 1]
        flexible = sum(h * d for h, d in zip(hist[low:edge], dynamic[low:edge], strict=True)) if dynamic else static
        spent += min(static, flexible)
        low = edge
    return spent


def best(
    hist: Sequence[float], latency: Sequence[float], k: int, dynamic: Sequence[float] | None = None
) -> tuple[int, float]:
    """The fewest edges that reach the least total, and that total, among all sets of at most k edges."""
    n = len(hist)
    found = [
        (total([*inner, n], hist, latency, dynamic), count + 1)
        for count in range(min(k, n))
        for inner in itertools.combinations(range(1, n), count)
    ]
    least = min(cost for cost, _ in found)
    return min(count for cost, count in found if cost <= least + 1e-9 * max(least, 1)), least


def check(hist: Sequence[float], latency: Sequence[float], k: int, dynamic: Sequence[float] | None = None) -> None:
    edges, mean = optimal_edges(hist, latency, k, dynamic)
    assert edges == sorted(set(edges)) and edges[-1] == len(hist) and edges[0] >= 1
    assert all(isinstance(edge, int) for edge in edges)
    assert len(edges) <= k
    count, least = best(hist, latency, k, dynamic)
    assert total(edges, hist, latency, dynamic) == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert mean == pytest.approx(least / sum(hist), rel=1e-9, abs=1e-9)
    assert len(edges) == count, (hist, latency, k, dynamic)


def laws(rng: random.Random, n: int) -> list[list[float]]:
    """Latencies of static engines: straight, in steps, flat, free, and without any order."""
    return [
        [1 + 0.5 * length for length in range(1, n + 1)],
        [float(1 + length // 3) for length in range(n)],
        [2.0] * n,
        [0.0] * n,
        [round(rng.uniform(0, 5), 1) for _ in range(n)],
        sorted(rng.uniform(0, 5) for _ in range(n)),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_edges_are_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    hist = [rng.choice((0, 0, 1, 2, 7)) for _ in range(n)]
    hist[rng.randrange(n)] += 1
    for latency in laws(rng, n):
        check(hist, latency, rng.randint(1, n + 2))


@pytest.mark.parametrize("seed", range(40))
def test_with_a_dynamic_engine_each_bin_uses_the_faster_engine(seed: int) -> None:
    rng = random.Random(1000 + seed)
    n = rng.randint(1, 8)
    hist = [rng.choice((0, 0.5, 1, 3)) for _ in range(n)]
    hist[rng.randrange(n)] += 1
    for latency in laws(rng, n):
        dynamic = [round(rng.uniform(0, 6), 1) for _ in range(n)]
        check(hist, latency, rng.randint(1, n + 2), dynamic)


def test_ties_go_to_fewest_edges() -> None:
    assert optimal_edges([1, 1, 1, 1], [3, 3, 3, 3], 4) == ([4], 3)
    assert optimal_edges([1, 0, 0, 1], [1, 2, 3, 4], 4) == ([1, 4], 2.5)
    # 0.1 + 0.2 and 0.3 differ by rounding alone.
    assert optimal_edges([1, 1, 1], [0.1 + 0.2, 0.3, 0.3], 3)[0] == [3]


def test_more_edges_may_pay_only_from_some_number_on() -> None:
    hist, latency = [5, 5, 5, 5], [1.0, 9.0, 2.0, 10.0]
    assert optimal_edges(hist, latency, 1) == ([4], 10)
    assert optimal_edges(hist, latency, 2) == ([3, 4], 4)
    assert optimal_edges(hist, latency, 3) == ([1, 3, 4], 3.75)
    assert optimal_edges(hist, latency, 4) == ([1, 3, 4], 3.75)


def test_more_edges_than_lengths() -> None:
    assert optimal_edges([1, 1], [1, 2], 100) == ([1, 2], 1.5)
    assert optimal_edges([4], [7], 3) == ([4 // 4], 7)


def test_a_dynamic_engine_that_is_always_faster_needs_no_edges() -> None:
    assert optimal_edges([1, 1, 1], [5, 6, 7], 3, [1, 2, 3]) == ([3], 2)


def test_scale_changes_nothing() -> None:
    rng = random.Random(9)
    hist = [rng.randint(0, 9) for _ in range(60)]
    latency = [0.3 + 0.01 * length + 1e-5 * length**2 for length in range(60)]
    edges, mean = optimal_edges(hist, latency, 7)
    scaled, scaled_mean = optimal_edges([h * 1e6 for h in hist], [ms * 1e-6 for ms in latency], 7)
    assert scaled == edges and len(edges) == 7
    assert scaled_mean == pytest.approx(mean * 1e-6)


def test_no_request_no_edges() -> None:
    with pytest.raises(ValueError, match="no request"):
        optimal_edges([0, 0], [1, 2], 2)


# Steps of a latency curve.

LENGTHS = list(range(16, 513, 16))


def steps(*ends: int, low: float = 1.0, rise: float = 0.5) -> list[float]:
    """The latency of each of LENGTHS on a staircase whose steps end there."""
    return [low + rise * sum(length > end for end in ends) for length in LENGTHS]


@pytest.mark.parametrize("ends", [(64, 128, 192), (16, 32), (496,), tuple(LENGTHS[:9]), ()])
def test_clean_steps(ends: tuple[int, ...]) -> None:
    assert step_ends(LENGTHS, steps(*ends)) == [*ends, 512]


@pytest.mark.parametrize("seed", range(20))
def test_noise_within_the_tolerance_makes_no_step(seed: int) -> None:
    rng = random.Random(seed)
    noisy = [ms * rng.uniform(0.98, 1.02) for ms in steps(64, 256, 400)]
    assert step_ends(LENGTHS, noisy) == [64, 256, 400, 512]


def test_tolerance_decides() -> None:
    curve = steps(256, rise=0.04)
    assert step_ends(LENGTHS, curve) == [512]
    assert step_ends(LENGTHS, curve, 0.03) == [256, 512]
    assert step_ends(LENGTHS, curve, 0.0) == [256, 512]
    assert step_ends([1, 2, 3], [1.0, 1.05, 1.0501]) == [2, 3]


def test_a_slow_rise_ends_a_step_at_the_tolerance() -> None:
    assert step_ends(range(1, 8), [1.00, 1.02, 1.04, 1.06, 1.08, 1.10, 1.12]) == [3, 6, 7]


def test_a_dip_replaces_slower_and_shorter_engines() -> None:
    # 96 tokens are slower than 128: their texts belong on the engine of 128.
    assert step_ends([32, 64, 96, 128, 160], [1, 1, 3, 2, 4]) == [64, 128, 160]
    assert step_ends([32, 64, 96], [3, 2, 1]) == [96]
    # One slow measurement is no step.
    assert step_ends([32, 64, 96, 128], [1, 9, 1, 1]) == [128]


def test_single_point_and_free_engines() -> None:
    assert step_ends([48], [2.0]) == [48]
    assert step_ends([1, 2, 3], [0, 0, 0]) == [3]
    assert step_ends([1, 2, 3], [0, 0, 1]) == [2, 3]
