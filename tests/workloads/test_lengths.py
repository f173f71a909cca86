from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.workloads import lengths
from shapeshift.workloads.lengths import LogNormal


def draw(law: LogNormal, seed: int = 0) -> np.ndarray:
    return law.sample(np.random.default_rng(seed), 100_000)


@pytest.mark.parametrize("law", [lengths.short(), lengths.long(), LogNormal(40, 90)])
def test_samples_have_the_median_and_percentile(law: LogNormal) -> None:
    drawn = draw(law)
    assert drawn.dtype == np.int64
    assert np.median(drawn) == pytest.approx(law.median, rel=0.03)
    assert np.percentile(drawn, 98) == pytest.approx(law.p98, rel=0.03)


def test_short_and_long_match_the_paper() -> None:
    short, long = lengths.short(), lengths.long()
    assert (short.median, short.p98) == (21, 72)
    assert (long.median, long.p98, long.high) == (pytest.approx(86.1), pytest.approx(295.2), 512)


def test_lengths_stay_within_the_bounds_and_reach_them() -> None:
    drawn = draw(LogNormal(20, 80, low=10, high=50))
    assert (drawn.min(), drawn.max()) == (10, 50)
    assert draw(lengths.long()).max() == 512


def test_fixed_lengths_are_all_the_same() -> None:
    assert set(draw(lengths.fixed(64)).tolist()) == {64}


def test_the_seed_decides_the_sample() -> None:
    law = lengths.short()
    assert np.array_equal(draw(law, seed=5), draw(law, seed=5))
    assert not np.array_equal(draw(law, seed=5), draw(law, seed=6))


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("median", {"median": 0, "p98": 5}),
        ("median", {"median": float("nan"), "p98": 5}),
        ("p98", {"median": 10, "p98": 9}),
        ("p98", {"median": 10, "p98": float("inf")}),
        ("low", {"median": 10, "p98": 20, "low": 0}),
        ("high", {"median": 10, "p98": 20, "low": 9, "high": 8}),
    ],
)
def test_an_invalid_distribution_is_refused_by_field(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        LogNormal(**arguments)
    assert refused.value.field == field
