"""Accuracy and latency of a candidate on a sample, as expectations over the random draws of Eq. 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.cascade.policy.routing import Array

# Assumed time of the decisions between two levels, in ms.
CONTROL_MS = 0.1


@dataclass(frozen=True)
class Exit:
    """The exit of each text at one level, [n] each: its probability, whether it is right, and the time until then."""

    probability: Array
    right: Array
    ms: Array

    def of(self, rows: Array) -> Exit:
        """The exits of some texts. rows: a mask [n]."""
        return Exit(self.probability[rows], self.right[rows], self.ms[rows])


@dataclass(frozen=True)
class ExpectedOutcome:
    """accuracy: 0 to 1; mean, 75th and 99th percentile of the time; shares: of the texts that exit at each level."""

    accuracy: float
    mean_ms: float
    p75_ms: float
    p99_ms: float
    shares: tuple[float, ...]


def expected_outcome(exits: Sequence[Exit]) -> ExpectedOutcome:
    """The expectation over all texts and their possible exits."""
    weights = np.concatenate([one.probability for one in exits])
    times = np.concatenate([one.ms for one in exits])
    count = len(exits[0].probability)
    p75, p99 = (weighted_percentile(times, weights, share) for share in (0.75, 0.99))
    return ExpectedOutcome(
        float(chances_of_right(exits).mean()),
        float((weights * times).sum() / count),
        p75,
        p99,
        tuple(float(one.probability.sum() / count) for one in exits),
    )


def chances_of_right(exits: Sequence[Exit]) -> Array:
    """The probability of a right answer to each text [n]."""
    return np.asarray(np.sum([one.probability * one.right for one in exits], axis=0))


def weighted_percentile(values: Array, weights: Array, share: float) -> float:
    """The smallest of `values` such that at least `share` of the weight is at or below it."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    place = int(np.searchsorted(reached, share * reached[-1] - 1e-9 * reached[-1]))
    return float(values[order][min(place, len(values) - 1)])
