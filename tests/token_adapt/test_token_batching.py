"""Algorithm 1 against a literal implementation, and the properties of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from shapeshift.token_adapt.policy.batching import Batch, BatchQueue


@dataclass
class Asked:
    index: int
    arrival: float
    latency: float
    utility: float
    excluded: frozenset[int] = frozenset()
    rank: int = 0

    def __post_init__(self) -> None:
        self.deadline = self.arrival + self.latency


def as_printed(requests: list[Asked], delta: float, epsilon: int, eta: float, mu: float) -> list[list[int]]:
    """The paper's lines; every property of a batch is recomputed each time."""
    batches: list[list[Asked]] = []
    for r in requests:
        for b in reversed(batches):
            if min(x.arrival for x in b) + delta < r.arrival:
                batches.append([r])
                break
            if len(b) >= epsilon or abs(min(x.deadline for x in b) - r.deadline) > eta:
                continue
            if abs(b[0].utility - r.utility) > mu:
                continue
            b.append(r)
            break
        else:
            batches.append([r])
    return [[r.index for r in b] for b in batches]


def batched(requests: list[Asked], limits: tuple[float, int, float, float]) -> list[list[int]]:
    queue: BatchQueue[Asked] = BatchQueue(*limits)
    for request in requests:
        queue.add(request)
    return [[request.index for request in batch.images] for batch in queue.batches]


@pytest.mark.parametrize("seed", range(20))
def test_batches_match_the_algorithm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.integers(0, 4, 120)).astype(float)
    # Few distinct values, so that equal ones occur.
    rows = [(a, float(rng.choice([5, 8, 12])), float(rng.choice([0.0, 0.5, 1.0, 2.0]))) for a in at.tolist()]
    requests = [Asked(index, *row) for index, row in enumerate(rows)]
    limits = (float(rng.integers(0, 9)), int(rng.integers(1, 9)), float(rng.integers(0, 9)), 0.5)
    assert batched(requests, limits) == as_printed(requests, *limits)


def test_limits_are_inclusive() -> None:
    limits = (10.0, 9, 5.0, 0.5)
    first = Asked(0, 0.0, 100.0, 1.0)
    assert batched([first, Asked(1, 10.0, 90.0, 1.0)], limits) == [[0, 1]]
    assert batched([first, Asked(1, 10.5, 90.0, 1.0)], limits) == [[0], [1]]
    assert batched([first, Asked(1, 0.0, 105.0, 1.5)], limits) == [[0, 1]]
    assert batched([first, Asked(1, 0.0, 105.5, 1.5)], limits) == [[0], [1]]
    assert batched([first, Asked(1, 0.0, 100.0, 1.75)], limits) == [[0], [1]]


def test_the_newest_batch_is_tried_first_and_an_old_batch_ends_the_search() -> None:
    limits = (10.0, 1, 1000.0, 9.0)
    full = [Asked(0, 0.0, 50.0, 1.0), Asked(1, 1.0, 50.0, 1.0)]
    assert batched(full, limits) == [[0], [1]]
    wide = (10.0, 64, 5.0, 9.0)
    # The third request fits only the first batch. So would the fourth, but the newest batch is too old for it.
    requests = [Asked(0, 0.0, 50.0, 1.0), Asked(1, 0.0, 90.0, 1.0), Asked(2, 4.0, 46.0, 1.0), Asked(3, 11.0, 39.0, 1.0)]
    assert batched(requests, wide) == [[0, 2], [1], [3]]


def test_the_deadline_of_a_batch_is_its_earliest_and_its_utility_the_first() -> None:
    batch: Batch[Asked] = Batch([Asked(0, 5.0, 50.0, 0.3)])
    batch.add(Asked(1, 2.0, 20.0, 0.9))
    assert (batch.arrival, batch.deadline, batch.utility, len(batch)) == (2.0, 22.0, 0.3, 2)
