"""What a batch costs at each gamma, from the measured profile: time, memory, throughput."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shapeshift.engines.policy.packs import MeasuredFactor
from shapeshift.errors import InvalidInputError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GammaProfile:
    """Measured costs of one gamma: tokens after the last block, latency [ms] by batch size, MB per image."""

    gamma: int
    tokens: int
    latency_ms: Mapping[int, float]
    memory_mb: float


class Costs:
    """Times [ms] and memory [MB] of batches of up to `max_size` images, less than `memory_mb`, at each of `gammas`.

    Latency is linear between the profiled batch sizes, and beyond the last one it continues with the last slope. All
    times are multiplied by `factor`, the measured over the profiled time of recent batches.
    """

    def __init__(
        self, profiles: Mapping[int, GammaProfile], gammas: Sequence[int], max_size: int, memory_mb: float = np.inf
    ) -> None:
        if not gammas:
            raise InvalidInputError("use_gammas", gammas, "at least one gamma")
        self.gammas = tuple(sorted(gammas))
        self.max_size = max_size
        self.memory_mb = memory_mb
        self.measured = MeasuredFactor()
        self._latency = np.stack(
            [_latency_curve(profiles[gamma].latency_ms, max_size) for gamma in self.gammas], axis=1
        )
        self._memory = np.array([profiles[gamma].memory_mb for gamma in self.gammas])
        self._min_latency = self._latency.min(axis=1)

    @property
    def longest_ms(self) -> float:
        """Profiled time of the largest batch at its slowest gamma."""
        return float(self._latency.max())

    @property
    def factor(self) -> float:
        return self.measured.value

    def times(self, counts: Sequence[int]) -> Floats:
        """[b, g] ms for batches of these sizes."""
        times: Floats = self._latency[np.asarray(counts, dtype=int)] * self.factor
        return times

    def min_time(self, count: int, excluded: Collection[int] = ()) -> float:
        """Time of a batch of that size at its fastest gamma, ms; excluded: gammas, by index, that it does not have."""
        fastest = np.delete(self._latency[count], list(excluded)).min() if excluded else self._min_latency[count]
        return float(fastest) * self.factor

    def memory(self, counts: Sequence[int]) -> Floats:
        """[b, g] MB for batches of these sizes."""
        memory: Floats = np.asarray(counts, dtype=float)[:, None] * self._memory
        return memory

    def throughput(self, size: int) -> dict[int, float]:
        """Profiled images a second in batches of `size`, by gamma."""
        return {gamma: 1000.0 * size / float(self._latency[size, index]) for index, gamma in enumerate(self.gammas)}

    def observe(self, gamma_index: int, count: int, took_ms: float) -> None:
        """Record the measured time of a batch of `count` images."""
        self.measured.observe(took_ms, float(self._latency[count, gamma_index]))


def efficient_batch_size(profile: GammaProfile, max_size: int, share: float) -> int:
    """The smallest batch size, up to `max_size`, that reaches `share` of the best throughput in images a second.

    Larger batches add little throughput and make all their images wait for the last one.
    """
    sizes = np.arange(1, max_size + 1)
    rates = sizes / _latency_curve(profile.latency_ms, max_size)[1:]
    return int(sizes[rates >= share * rates.max()][0])


def _latency_curve(latency_ms: Mapping[int, float], max_size: int) -> Floats:
    """Latency of 0..max_size images, non-decreasing."""
    points = sorted(latency_ms.items())
    if not points or any(not 0 < ms < np.inf for _, ms in points):
        raise InvalidInputError("profile", dict(latency_ms), "latencies above 0 for at least one batch size")
    counts, values = [float(count) for count, _ in points], [ms for _, ms in points]
    last = max(max_size, counts[-1] + 1)
    if len(points) > 1:
        slope = max(0.0, (values[-1] - values[-2]) / (counts[-1] - counts[-2]))
    else:
        slope = values[0] / counts[0]
    counts, values = [*counts, last], [*values, values[-1] + slope * (last - counts[-1])]
    curve: Floats = np.maximum.accumulate(np.interp(np.arange(max_size + 1), counts, values))
    return curve
