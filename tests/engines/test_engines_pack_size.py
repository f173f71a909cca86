from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from shapeshift.engines.policy.packs import rows_to_take


@pytest.mark.parametrize("seed", range(200))
def test_invariants(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 512) for _ in range(rng.randint(1, 40))]
    workers, tokens, max_rows = rng.randint(1, 5), rng.randint(1, 600), rng.randint(1, 16)
    taken = rows_to_take(lengths, len(lengths), workers, tokens, max_rows)
    share = -(-len(lengths) // workers)
    assert 1 <= taken <= min(max_rows, share, len(lengths))
    assert taken == 1 or sum(lengths[:taken]) <= tokens
    # One more row would exceed one of the three limits.
    if taken < min(max_rows, share):
        assert sum(lengths[: taken + 1]) > tokens


def test_the_head_is_taken_however_long() -> None:
    assert rows_to_take([500], 1, 2, 100, 16) == 1
    assert rows_to_take([500, 1, 1], 3, 1, 100, 16) == 1


def test_order_is_kept_even_where_a_later_row_would_fit() -> None:
    assert rows_to_take([10, 10, 90, 10], 4, 1, 100, 16) == 2


def test_idle_threads_get_their_share() -> None:
    assert [rows_to_take([1] * n, n, 2, 1000, 16) for n in range(1, 8)] == [1, 1, 2, 2, 3, 3, 4]
    assert rows_to_take([1] * 100, 100, 2, 1000, 16) == 16
    assert rows_to_take([1] * 100, 100, 2, 1000, 1) == 1


def test_reads_only_the_lengths_it_needs() -> None:
    def endless() -> Iterator[int]:
        yield from itertools.repeat(30, 5)
        raise AssertionError("read on")

    assert rows_to_take(endless(), 1000, 1, 100, 16) == 3
    assert rows_to_take(endless(), 8, 2, 1000, 16) == 4
