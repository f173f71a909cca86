"""The prediction of a wait: what rows cost, and the correction by recent calls."""

from __future__ import annotations

import pytest

from shapeshift.engines.policy.packs import MeasuredFactor, row_costs


def test_a_row_costs_its_share_of_a_full_call() -> None:
    pack_ms = [0.0, 5.0, 5.0, 6.0, 6.0, 7.0, 9.0, 12.0, 16.0]
    # Calls of 6 tokens: six rows of one token, three of two, two of three, and one of more.
    assert row_costs(pack_ms, 6, 16) == [0.0, 1.5, 3.0, 4.5, 6.0, 7.0, 9.0, 12.0, 16.0]
    assert row_costs(pack_ms, 6, 2)[1] == 2.5
    assert row_costs(pack_ms, 6, 1) == pack_ms


def test_the_factor_follows_recent_calls() -> None:
    factor = MeasuredFactor()
    factor.observe(took=150.0, profiled=100.0)
    assert factor.value == pytest.approx(1.05)
    # One call that was delayed a hundredfold counts as one of twice the time.
    factor.observe(took=10_000.0, profiled=100.0)
    assert factor.value == pytest.approx(1.05 * 1.1)
    factor.observe(took=1.0, profiled=0.0)
    assert factor.value == pytest.approx(1.05 * 1.1)
    for _ in range(200):
        factor.observe(took=300.0, profiled=100.0)
    assert factor.value == pytest.approx(3.0, rel=1e-3)
    for _ in range(500):
        factor.observe(took=1.0, profiled=100.0)
    assert factor.value == 0.5
