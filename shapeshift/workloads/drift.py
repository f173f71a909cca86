"""Text lengths whose distribution changes over time, as that of a real service does over a day (Arlo, section 2.2)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shapeshift.settings import require
from shapeshift.workloads.lengths import LogNormal


def drifting(
    lengths: LogNormal, at_s: NDArray[np.float64], drift: float, period_s: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Lengths int64[n] for arrivals at `at_s` (seconds), drawn from `lengths` with an oscillating median.

    The logarithm of the median is shifted by `drift` times a sine of period `period_s`. Raises InvalidInputError with
    the name of the argument.
    """
    require(math.isfinite(drift) and drift >= 0, "drift", drift, "must be at least 0")
    require(math.isfinite(period_s) and period_s > 0, "period_s", period_s, "must be above 0")
    swing = np.exp(drift * np.sin(2 * np.pi * at_s / period_s))
    drawn = rng.lognormal(math.log(lengths.median), lengths.sigma, len(at_s)) * swing
    tokens: NDArray[np.int64] = np.rint(drawn).clip(lengths.low, lengths.high).astype(np.int64)
    return tokens
