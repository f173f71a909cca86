"""Replacement plans: fewest changes, least distance, and a safe order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shapeshift.polymorph.policy.replace import batches, changes


def case(seed: int) -> tuple[list[int], list[int], list[int]]:
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.choice(np.arange(1, 513), int(rng.integers(1, 6)), replace=False)).tolist()
    workers = int(rng.integers(0, 8))
    have = rng.choice(edges, workers).tolist()
    want = np.bincount(rng.integers(0, len(edges), workers), minlength=len(edges)).tolist()
    return have, want, edges


@pytest.mark.parametrize("seed", range(100))
def test_fewest_changes_and_least_distance(seed: int) -> None:
    have, want, edges = case(seed)
    planned = changes(have, want, edges)
    after = list(have)
    for worker, edge in planned:
        assert after[worker] != edge
        after[worker] = edge
    assert [after.count(edge) for edge in edges] == want
    assert planned == sorted(planned)
    goal = [edge for edge, count in zip(edges, want, strict=True) for _ in range(count)]
    targets = set(itertools.permutations(goal)) if len(have) < 7 else set()
    for target in targets:
        moved = [(a, b) for a, b in zip(have, target, strict=True) if a != b]
        assert len(moved) >= len(planned)
        if len(moved) == len(planned):
            assert sum(abs(a - b) for a, b in moved) >= sum(abs(have[w] - b) for w, b in planned)


def test_the_last_workers_of_a_bin_change() -> None:
    assert changes([64, 64, 64, 128], [1, 3], [64, 128]) == [(1, 128), (2, 128)]
    assert changes([64, 128], [1, 1], [64, 128]) == []
    assert changes([], [0], [64]) == []


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("seed", range(60))
def test_long_lengths_never_have_fewer_workers_than_before_or_after(seed: int, size: int) -> None:
    have, want, edges = case(seed)
    planned = changes(have, want, edges)
    steps = list(batches(planned, have, size))
    assert sorted(itertools.chain(*steps)) == planned
    assert all(0 < len(step) <= size for step in steps)
    held = list(have)
    taken_by = {edge: sum(one >= edge for one in have) for edge in edges}
    in_the_end = {edge: sum(want[index:]) for index, edge in enumerate(edges)}
    for step in steps:
        for worker, edge in step:
            held[worker] = edge
        for edge in edges:
            assert sum(one >= edge for one in held) >= min(taken_by[edge], in_the_end[edge])


@pytest.mark.parametrize(
    ("have", "want", "edges", "named"),
    [
        ([64], [1, 1], [64, 128], "want"),
        ([64], [1], [64, 128], "want"),
        ([64, 64], [3, -1], [64, 128], "want"),
        ([65], [1, 0], [64, 128], "have"),
        ([64], [1, 0], [128, 64], "edges"),
    ],
)
def test_invalid_plans_are_refused(have: list[int], want: list[int], edges: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        changes(have, want, edges)


def test_a_batch_has_at_least_one_change() -> None:
    with pytest.raises(ValueError, match="size"):
        list(batches([(0, 128)], [64], 0))
