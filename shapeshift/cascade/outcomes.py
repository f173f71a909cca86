"""What a candidate would do to a sample, worked out from what its models made of it: no draw, but expectations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.cascade.softmax import Array

# Control logic between two levels, in ms, until it is measured where it serves.
CONTROL_MS = 0.1


@dataclass(frozen=True)
class Stop:
    """Queries that end at one level: how likely each does [n], whether it is right then [n], the time it took [n]."""

    probability: Array
    right: Array
    ms: Array


@dataclass(frozen=True)
class Expected:
    """accuracy: 0 to 1; mean, 75th and 99th percentile of the time, ms; share of the queries that end at each level."""

    accuracy: float
    mean_ms: float
    p75_ms: float
    p99_ms: float
    shares: tuple[float, ...]


def expected(stops: Sequence[Stop]) -> Expected:
    """Over all queries and the ways in which each may end."""
    weights = np.concatenate([stop.probability for stop in stops])
    times = np.concatenate([stop.ms for stop in stops])
    right = np.concatenate([stop.right for stop in stops])
    queries = len(stops[0].probability)
    p75, p99 = (weighted_percentile(times, weights, share) for share in (0.75, 0.99))
    return Expected(
        float((weights * right).sum() / queries),
        float((weights * times).sum() / queries),
        p75,
        p99,
        tuple(float(stop.probability.sum() / queries) for stop in stops),
    )


def weighted_percentile(values: Array, weights: Array, share: float) -> float:
    """The least of `values` that at least `share` of the weight does not exceed."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    place = int(np.searchsorted(reached, share * reached[-1] - 1e-9 * reached[-1]))
    return float(values[order][min(place, len(values) - 1)])
