"""Lengths with an oscillating median."""

from __future__ import annotations

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.workloads import lengths
from shapeshift.workloads.lengths import drifting


def test_without_drift_the_distribution_is_unchanged() -> None:
    at_s = np.linspace(0.0, 100.0, 1000)
    drawn = drifting(lengths.long(), at_s, 0.0, 50.0, np.random.default_rng(0))
    assert drawn.tolist() == lengths.long().sample(np.random.default_rng(0), 1000).tolist()


def test_median_follows_the_sine() -> None:
    at_s = np.tile([0.0, 25.0, 75.0], 4000)
    law = lengths.long()
    drawn = drifting(law, at_s, 0.5, 100.0, np.random.default_rng(1))
    middle, high, low = (np.median(drawn[at_s == at]) for at in (0.0, 25.0, 75.0))
    assert high / middle == pytest.approx(np.exp(0.5), rel=0.05)
    assert low / middle == pytest.approx(np.exp(-0.5), rel=0.05)
    assert drawn.min() >= law.low
    assert drawn.max() <= law.high


@pytest.mark.parametrize(("drift", "period_s", "field"), [(-0.1, 10.0, "drift"), (0.1, 0.0, "period_s")])
def test_bad_settings_are_named(drift: float, period_s: float, field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        drifting(lengths.long(), np.zeros(1), drift, period_s, np.random.default_rng(0))
