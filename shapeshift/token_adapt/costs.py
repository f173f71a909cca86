"""What a batch costs at each gamma, from the measured profile: time, memory, throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.interfaces import GammaProfile

Floats = NDArray[np.float64]

_PACE = 0.1
_LEAST_FACTOR, _MOST_FACTOR = 0.5, 8.0


class Costs:
    """Times [ms] and memory [MB] of batches of up to `size` images at each of `gammas`.

    Between the profiled batch sizes latency is straight, beyond the last it goes on as between the last two. All
    times are scaled by `factor`, which `observe` moves towards what batches really take.
    """

    def __init__(self, profiles: Mapping[int, GammaProfile], gammas: Sequence[int], size: int) -> None:
        if not gammas:
            raise InvalidInputError("use_gammas", gammas, "at least one gamma")
        self.gammas = tuple(sorted(gammas))
        self.factor = 1.0
        self._table = np.stack([_curve(profiles[gamma].latency_ms, size) for gamma in self.gammas], axis=1)
        self._memory = np.array([profiles[gamma].memory_mb for gamma in self.gammas])
        self._fastest = self._table.min(axis=1)

    def times(self, counts: Sequence[int]) -> Floats:
        """[b, g] for batches of these sizes."""
        found: Floats = self._table[np.asarray(counts, dtype=int)] * self.factor
        return found

    def fastest(self, count: int) -> float:
        """The least time of a batch of that size."""
        return float(self._fastest[count]) * self.factor

    def memory(self, counts: Sequence[int]) -> Floats:
        """[b, g] MB for batches of these sizes."""
        found: Floats = np.asarray(counts, dtype=float)[:, None] * self._memory
        return found

    def throughput(self, size: int) -> dict[int, float]:
        """Images a second by gamma in batches of `size`, as profiled."""
        return {gamma: 1000.0 * size / float(self._table[size, g]) for g, gamma in enumerate(self.gammas)}

    def observe(self, gamma: int, count: int, took_ms: float) -> None:
        """A batch of `count` images at the gamma of that index took so long."""
        seen = took_ms / float(self._table[count, gamma])
        # One batch that was held up must not make all others look slow.
        likely = min(max(seen, self.factor / 2), self.factor * 2)
        moved = self.factor + _PACE * (likely - self.factor)
        self.factor = min(max(moved, _LEAST_FACTOR), _MOST_FACTOR)


def fitting_size(profile: GammaProfile, most: int, share: float) -> int:
    """The least batch size, up to `most`, whose images a second are at least `share` of the best one's.

    Larger batches gain little then, and make all their images wait for the last.
    """
    sizes = np.arange(1, most + 1)
    rates = sizes / _curve(profile.latency_ms, most)[1:]
    return int(sizes[rates >= share * rates.max()][0])


def _curve(latency_ms: Mapping[int, float], size: int) -> Floats:
    """Latency of 0..size images, never falling."""
    points = sorted(latency_ms.items())
    if not points or any(not 0 < ms < np.inf for _, ms in points):
        raise InvalidInputError("profile", dict(latency_ms), "latencies above 0 for at least one batch size")
    counts, values = [float(count) for count, _ in points], [ms for _, ms in points]
    last = max(size, counts[-1] + 1)
    if len(points) > 1:
        slope = max(0.0, (values[-1] - values[-2]) / (counts[-1] - counts[-2]))
    else:
        slope = values[0] / counts[0]
    counts, values = [*counts, last], [*values, values[-1] + slope * (last - counts[-1])]
    found: Floats = np.maximum.accumulate(np.interp(np.arange(size + 1), counts, values))
    return found
