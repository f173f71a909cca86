"""How calls share the cores of engine threads."""

from __future__ import annotations

import pytest

from shapeshift.engines.policy.packs import MOST_CORES, CoreShares


@pytest.mark.parametrize(
    ("threads", "calls", "each"),
    [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 9, 1), (6, 1, 6), (6, 2, 3), (6, 4, 1), (64, 1, MOST_CORES), (64, 10, 6)],
)
def test_calls_share_the_cores_equally(threads: int, calls: int, each: int) -> None:
    assert CoreShares(threads).each(calls, 0.0) == each


def test_a_lull_between_many_calls_changes_nothing() -> None:
    shares = CoreShares(4)
    given = [(1, 0.0), (4, 0.001), (1, 0.006), (2, 0.010), (2, 0.0101), (1, 0.012), (2, 0.013), (1, 0.022), (1, 0.024)]
    assert [shares.each(calls, now) for calls, now in given] == [4, 1, 1, 1, 1, 4, 2, 2, 4]


def test_cores_that_did_not_pay_are_left_alone_for_a_second() -> None:
    shares = CoreShares(2)
    # One that was delayed says little.
    shares.observe(took_ms=90.0, one_core_ms=10.0, now=5.0)
    assert shares.each(1, 5.1) == 2
    while shares.each(1, 6.0) == 2:
        shares.observe(took_ms=10.0, one_core_ms=10.0, now=6.0)
    assert [shares.each(1, now) for now in (6.9, 7.1)] == [1, 2]
    shares.observe(took_ms=8.1, one_core_ms=10.0, now=7.1)
    assert [shares.each(1, now) for now in (8.0, 8.2)] == [1, 2]
    for now in (8.2, 8.3):
        shares.observe(took_ms=6.0, one_core_ms=10.0, now=now)
    assert shares.each(1, 8.4) == 2


def test_calls_without_a_profile_share_the_cores() -> None:
    shares = CoreShares(2)
    for _ in range(9):
        shares.observe(took_ms=9.0, one_core_ms=0.0, now=1.0)
    assert shares.each(1, 1.0) == 2
