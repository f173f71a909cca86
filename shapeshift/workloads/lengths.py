"""Distributions of text lengths in tokens, including special tokens."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from shapeshift.settings import require

MAX_LENGTH = 512
_Z98 = NormalDist().inv_cdf(0.98)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths, rounded to whole tokens and clipped to [low, high].

    `median` and `p98` (98th percentile) are those before rounding and clipping. If they are equal, all lengths are the
    same. Raises InvalidInputError with the name of the field.
    """

    median: float
    p98: float
    low: int = 1
    high: int = MAX_LENGTH

    def __post_init__(self) -> None:
        require(math.isfinite(self.median) and self.median > 0, "median", self.median, "must be above 0")
        require(
            math.isfinite(self.p98) and self.p98 >= self.median,
            "p98",
            self.p98,
            f"must be at least the median ({self.median})",
        )
        require(self.low >= 1, "low", self.low, "must be at least 1 token")
        require(self.high >= self.low, "high", self.high, f"must be at least low ({self.low})")

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of the length."""
        return math.log(self.p98 / self.median) / _Z98

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` independent lengths in tokens, int64[count]."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        tokens: NDArray[np.int64] = np.rint(drawn).clip(self.low, self.high).astype(np.int64)
        return tokens

    def scaled(self, factor: float, at_most: int = MAX_LENGTH) -> LogNormal:
        """This distribution with every length multiplied by `factor` and limited to `at_most`."""
        require(math.isfinite(factor) and factor > 0, "factor", factor, "must be above 0")
        low, high = (min(max(1, round(bound * factor)), at_most) for bound in (self.low, self.high))
        return dataclasses.replace(self, median=self.median * factor, p98=self.p98 * factor, low=low, high=high)


def short() -> LogNormal:
    """Short posts: median 21 and 98th percentile 72 tokens, at most 125 (Arlo, sections 2.2 and 5)."""
    return LogNormal(median=21, p98=72, low=3, high=125)


def long() -> LogNormal:
    """`short` scaled by 4.1, which reaches 512 tokens, as Arlo recalibrates its trace (section 5)."""
    return short().scaled(4.1)


def fixed(length: int) -> LogNormal:
    """All texts have `length` tokens."""
    return LogNormal(median=length, p98=length, low=length, high=length)


def drifting(
    lengths: LogNormal, at_s: NDArray[np.float64], drift: float, period_s: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Lengths int64[n] for arrivals at `at_s` (seconds), drawn from `lengths` with an oscillating median.

    So the lengths of a real service change over a day (Arlo, section 2.2).

    The logarithm of the median is shifted by `drift` times a sine of period `period_s`. Raises InvalidInputError with
    the name of the argument.
    """
    require(math.isfinite(drift) and drift >= 0, "drift", drift, "must be at least 0")
    require(math.isfinite(period_s) and period_s > 0, "period_s", period_s, "must be above 0")
    swing = np.exp(drift * np.sin(2 * np.pi * at_s / period_s))
    drawn = rng.lognormal(math.log(lengths.median), lengths.sigma, len(at_s)) * swing
    tokens: NDArray[np.int64] = np.rint(drawn).clip(lengths.low, lengths.high).astype(np.int64)
    return tokens
