"""Algorithm 1 against a second writing of it, and what must hold of every batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from shapeshift.token_adapt.batching import Batch, BatchQueue, BatchRules


@dataclass(frozen=True)
class Asked:
    index: int
    arrived: float
    latency: float
    utility: float

    @property
    def deadline(self) -> float:
        return self.arrived + self.latency


def as_printed(requests: list[Asked], delta: float, epsilon: int, eta: float, mu: float) -> list[list[int]]:
    """The paper's lines, with everything about a batch worked out anew each time."""
    batches: list[list[Asked]] = []
    for r in requests:
        for b in reversed(batches):
            if min(x.arrived for x in b) + delta < r.arrived:
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


def batched(requests: list[Asked], rules: BatchRules) -> list[list[int]]:
    queue: BatchQueue[Asked] = BatchQueue(rules)
    for request in requests:
        queue.add(request)
    return [[query.index for query in batch.queries] for batch in queue.batches]


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_those_of_the_algorithm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.integers(0, 4, 120)).astype(float)
    # Few distinct values, so that equalities happen.
    rows = [(a, float(rng.choice([5, 8, 12])), float(rng.choice([0.0, 0.5, 1.0, 2.0]))) for a in at.tolist()]
    requests = [Asked(index, *row) for index, row in enumerate(rows)]
    rules = BatchRules(float(rng.integers(0, 9)), int(rng.integers(1, 9)), float(rng.integers(0, 9)), 0.5)
    assert batched(requests, rules) == as_printed(
        requests, rules.window_ms, rules.size, rules.deadline_ms, rules.utility
    )


def test_what_equals_a_limit_joins() -> None:
    rules = BatchRules(10.0, 9, 5.0, 0.5)
    first = Asked(0, 0.0, 100.0, 1.0)
    assert batched([first, Asked(1, 10.0, 90.0, 1.0)], rules) == [[0, 1]]
    assert batched([first, Asked(1, 10.5, 90.0, 1.0)], rules) == [[0], [1]]
    assert batched([first, Asked(1, 0.0, 105.0, 1.5)], rules) == [[0, 1]]
    assert batched([first, Asked(1, 0.0, 105.5, 1.5)], rules) == [[0], [1]]
    assert batched([first, Asked(1, 0.0, 100.0, 1.75)], rules) == [[0], [1]]


def test_the_newest_batch_is_tried_first_and_old_ones_end_the_search() -> None:
    rules = BatchRules(10.0, 1, 1000.0, 9.0)
    full = [Asked(0, 0.0, 50.0, 1.0), Asked(1, 1.0, 50.0, 1.0)]
    assert batched(full, rules) == [[0], [1]]
    wide = BatchRules(10.0, 64, 5.0, 9.0)
    # The third request fits the first batch alone; the fourth would too, but the newest batch is too old for it.
    requests = [Asked(0, 0.0, 50.0, 1.0), Asked(1, 0.0, 90.0, 1.0), Asked(2, 4.0, 46.0, 1.0), Asked(3, 11.0, 39.0, 1.0)]
    assert batched(requests, wide) == [[0, 2], [1], [3]]


def test_the_deadline_of_a_batch_is_its_earliest_and_its_utility_the_first() -> None:
    batch: Batch[Asked] = Batch([Asked(0, 5.0, 50.0, 0.3)])
    batch.add(Asked(1, 2.0, 20.0, 0.9))
    assert (batch.arrived, batch.deadline, batch.utility, len(batch)) == (2.0, 22.0, 0.3, 2)
    batch.set([Asked(2, 7.0, 70.0, 0.5)])
    assert (batch.arrived, batch.deadline, batch.utility, len(batch)) == (7.0, 77.0, 0.5, 1)
