"""Latency curves: the three evaluations agree, and say what the formulas say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shapeshift.polymorph.policy.allocate_dp import latency
from shapeshift.polymorph.policy.curves import MD1, Affine, Clamped, Curve, Table, encode

CURVES: list[Curve] = [
    Affine(3.0),
    Clamped(3.0),
    MD1(3.0, 50.0),
    MD1(0.7, 12.5),
    Table((4.0,)),
    Table((4.0, 6.0, 7.0, 12.0)),
    Table((9.0, 4.0, 3.0)),
]
LOADS = np.concatenate([np.linspace(0, 60, 241), [1e-9, 0.98 * 50, 50.0, 500.0, 1e6]])


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_scalar_vector_and_compiled_agree(curve: Curve) -> None:
    one_by_one = [curve.latency(float(load)) for load in LOADS]
    coded = encode([Affine(1.0), curve, Clamped(2.0)])
    values = coded.values[coded.starts[1] : coded.starts[2]]
    compiled = [latency(coded.kinds[1], values, float(load)) for load in LOADS]
    np.testing.assert_allclose(curve.latencies(LOADS), one_by_one, rtol=1e-14)
    np.testing.assert_allclose(compiled, one_by_one, rtol=1e-14)


def test_formulas() -> None:
    assert Affine(2.0).latency(0.0) == 1.0
    assert Affine(2.0).latency(5.0) == 6.0
    assert Clamped(2.0).latency(0.25) == 2.0
    assert Clamped(2.0).latency(5.0) == 6.0
    assert MD1(2.0, 10.0).latency(5.0) == 2.0 * 1.5
    at_full = 2.0 * (1 + 0.98 / 0.04) + 1000 * 2.0 * (1.0 - 0.98)
    assert MD1(2.0, 10.0).latency(10.0) == pytest.approx(at_full)


def test_table_is_straight_between_its_points_and_beyond() -> None:
    table = Table((4.0, 6.0, 7.0))
    assert [table.latency(load) for load in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 10.0)] == [
        4.0,
        4.0,
        4.0,
        5.0,
        6.0,
        6.5,
        7.0,
        8.0,
        14.0,
    ]
    assert Table((4.0,)).latency(100.0) == 4.0


@pytest.mark.parametrize("seed", range(40))
def test_rising_is_false_where_fewer_requests_cost_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = Table(tuple(rng.uniform(1, 3, rng.integers(1, 5)).tolist()))
    loads = np.linspace(0, 50, 20_001)
    costs = loads * table.latencies(loads)
    assert table.rising == bool((np.diff(costs) >= -1e-9).all())


def test_the_formula_curves_rise() -> None:
    for curve in CURVES[:4]:
        assert curve.rising
        assert (np.diff(np.sort(LOADS) * curve.latencies(np.sort(LOADS))) >= 0).all()


@pytest.mark.parametrize("make", [lambda: Affine(0.0), lambda: Clamped(-1.0), lambda: MD1(1.0, 0.0), lambda: Table(())])
def test_invalid_parameters_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"got"):
        make()
