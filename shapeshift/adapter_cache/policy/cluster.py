"""Exact one-dimensional k-means (Chameleon, section 4.2, "Determining the number of queues")."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_GAIN = 0.05
"""Share of the WCSS of one cluster that a further cluster must remove."""
MIN_VARIATION = 0.1
"""Standard deviation, as a share of the mean, below which there is one cluster."""


@dataclass(frozen=True)
class Clusters:
    """wcss: sum of the squared distances to the centroids; cutoffs: midpoints of neighbouring centroids."""

    k: int
    wcss: float
    centroids: tuple[float, ...]
    cutoffs: tuple[float, ...]

    def of(self, value: float) -> int:
        """The cluster of a value; a value equal to a cutoff belongs to the upper cluster."""
        return bisect_right(self.cutoffs, value)


def cluster(values: Sequence[float], k: int | None = None, max_k: int = 4) -> Clusters:
    """The `k` clusters with the lowest WCSS, at most one for each distinct value. `values` must not be empty.

    k None: chosen by a rule, at most `max_k`. The WCSS falls with every further cluster, so its minimum, which the
    paper names, would always give `max_k`. The rule takes the smallest k after which one more cluster removes less than
    5% of the WCSS of one cluster; and 1 if the standard deviation is below a tenth of the mean.
    Time O(k n^2) at worst over n distinct values, in vector operations of length n.
    """
    points, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    line = _SortedValues(points, counts.astype(np.float64))
    if k is not None:
        return line.split(line.solve(min(k, len(points)))[-1])
    if line.is_narrow():
        return line.split(line.solve(1)[-1])
    layers = line.solve(min(max_k, len(points)))
    wcss = [layer.wcss for layer in layers]
    enough = (at for at in range(len(wcss) - 1) if wcss[at] - wcss[at + 1] < MIN_GAIN * wcss[0])
    return line.split(layers[next(enough, len(wcss) - 1)])


@dataclass(frozen=True)
class _Layer:
    """An optimum: its WCSS, and the index of the first value of each cluster."""

    wcss: float
    begins: tuple[int, ...]


class _SortedValues:
    """Distinct ascending values with their counts."""

    def __init__(self, values: Floats, weights: Floats) -> None:
        self._values, self._weights = values, weights
        self._mean = float(np.average(values, weights=weights))
        # Sums of centered values: squares of large numbers would cancel.
        centered = values - self._mean
        self._count = _sums(weights)
        self._sum = _sums(weights * centered)
        self._square = _sums(weights * centered**2)

    def is_narrow(self) -> bool:
        deviation = float(np.sqrt(self._square[-1] / self._count[-1]))
        return deviation < MIN_VARIATION * abs(self._mean)

    def solve(self, max_clusters: int) -> list[_Layer]:
        """The optima of 1 to `max_clusters` clusters, by dynamic programming over the begin of the last cluster."""
        size = len(self._values)
        ends = np.arange(1, size + 1)
        best = self._cost(np.zeros(size, np.int64), ends)
        splits: list[NDArray[np.int64]] = []
        layers = [_Layer(float(best[-1]), (0,))]
        for clusters in range(2, max_clusters + 1):
            best, split = self._extend(best, clusters)
            splits.append(split)
            layers.append(_Layer(float(best[-1]), self._trace(splits)))
        return layers

    def split(self, layer: _Layer) -> Clusters:
        ends = (*layer.begins[1:], len(self._values))
        bounds = list(zip(layer.begins, ends, strict=True))
        centroids = tuple(float(np.average(self._values[a:b], weights=self._weights[a:b])) for a, b in bounds)
        cutoffs = tuple((a + b) / 2 for a, b in zip(centroids, centroids[1:], strict=False))
        return Clusters(len(bounds), layer.wcss, centroids, cutoffs)

    def _extend(self, best: Floats, clusters: int) -> tuple[Floats, NDArray[np.int64]]:
        """One more cluster: the lowest WCSS of the first n values, and where the last cluster begins."""
        extended = np.full(len(best), np.inf)
        split = np.zeros(len(best), np.int64)
        begin = clusters - 1
        for end in range(clusters, len(best) + 1):
            # The best begin never decreases as values are added.
            begins = np.arange(begin, end)
            costs = best[begins - 1] + self._cost(begins, end)
            at = int(costs.argmin())
            begin = begin + at
            extended[end - 1], split[end - 1] = costs[at], begin
        return extended, split

    def _trace(self, splits: list[NDArray[np.int64]]) -> tuple[int, ...]:
        end = len(self._values)
        begins: list[int] = []
        for split in reversed(splits):
            end = int(split[end - 1])
            begins.append(end)
        return (0, *reversed(begins))

    def _cost(self, begin: NDArray[np.int64], end: Any) -> Floats:
        """WCSS of the values [begin, end) as one cluster."""
        count = self._count[end] - self._count[begin]
        mean_part = (self._sum[end] - self._sum[begin]) ** 2 / count
        cost: Floats = np.maximum(self._square[end] - self._square[begin] - mean_part, 0.0)
        return cost


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
