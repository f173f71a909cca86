"""Clusters on a line against brute force, and the rule for how many."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shapeshift.adapter_cache.policy.cluster import cluster


def brute(values: list[float], k: int) -> float:
    """The least WCSS of k clusters, over all ways to cut the sorted values."""
    line = sorted(values)
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(line)), k - 1):
        parts = [line[a:b] for a, b in zip((0, *cuts), (*cuts, len(line)), strict=True)]
        best = min(best, sum(len(part) * float(np.var(part)) for part in parts))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_split_is_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.choice([rng.integers(0, 12, 9).astype(float), rng.lognormal(3, 1, 9), rng.random(9) * 1e6])
    for k in range(1, 6):
        found = cluster(values.tolist(), k)
        distinct = len(set(values.tolist()))
        assert found.k == min(k, distinct) == len(found.centroids) == len(found.cutoffs) + 1
        assert found.wcss == pytest.approx(brute(values.tolist(), found.k), rel=1e-9, abs=1e-6)


def test_centroids_are_means_and_cutoffs_their_middles() -> None:
    found = cluster([1, 2, 3, 11, 12, 13, 101], 3)
    assert found.centroids == pytest.approx((2, 12, 101))
    assert found.cutoffs == pytest.approx((7, 56.5))
    assert found.wcss == pytest.approx(4)
    assert [found.of(value) for value in (0, 6.9, 7, 56, 57)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
def test_the_rule_finds_clear_clusters(clusters: int) -> None:
    rng = np.random.default_rng(clusters)
    values = np.concatenate([rng.normal(100 * (at + 1), 3, 80) for at in range(clusters)])
    assert cluster(values.tolist()).k == clusters


def test_the_rule_on_shapes_without_clear_clusters() -> None:
    rng = np.random.default_rng(0)
    assert cluster(rng.lognormal(5, 1, 1000).tolist()).k == 4
    assert cluster(np.linspace(0, 1, 1000).tolist()).k == 3
    assert cluster(rng.normal(100, 5, 1000).tolist()).k == 1
    assert cluster([5.0] * 20).k == 1
    assert cluster([0.0] * 20).k == 1
    assert cluster([0, 1], max_k=4).k == 2
    assert cluster(rng.lognormal(5, 1, 1000).tolist(), max_k=2).k == 2


def test_more_clusters_never_have_a_greater_wcss() -> None:
    values = np.random.default_rng(3).lognormal(2, 1, 200).tolist()
    sums = [cluster(values, k).wcss for k in range(1, 30)]
    assert all(b <= a + 1e-9 for a, b in zip(sums, sums[1:], strict=False))


def test_far_from_zero_nothing_is_lost_to_rounding() -> None:
    base = cluster([1, 2, 3, 11, 12, 13], 2)
    moved = cluster([value + 1e9 for value in (1, 2, 3, 11, 12, 13)], 2)
    assert moved.wcss == pytest.approx(base.wcss, rel=1e-6)
