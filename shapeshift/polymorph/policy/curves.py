"""Latency curves of one instance: the mean latency of requests by their number within one SLO.

They are the L_i of Arlo's allocation problem (section 3.3). `Affine` is the paper's: B requests arrive at once and
are served one after the other. `MD1` gives better allocations: the requests arrive spread over the SLO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# The disk cache of compiled code contains these numbers: add new ones, never renumber.
AFFINE, CLAMPED, TABLE, QUEUE = range(4)

# An M/D/1 queue has no finite sojourn time at full load: beyond this load the curve continues as a steep line.
FULL_LOAD = 0.98
OVERLOAD_SLOPE = 1000.0


class Curve(Protocol):
    """Mean latency (ms) by workload B >= 0, the requests of one instance within one SLO; frozen."""

    @property
    def rising(self) -> bool:
        """Whether B x latency never falls as B grows, so that fewer requests never cost more."""

    def latency(self, load: float) -> float:
        """Mean latency (ms) at one workload."""

    def latencies(self, loads: Floats) -> Floats:
        """Mean latencies (ms) at many workloads, in the shape of `loads`."""

    def code(self) -> tuple[int, tuple[float, ...]]:
        """The number of the kind and the parameters, for compiled code."""


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: got {value}; a number above 0")


@dataclass(frozen=True)
class Affine:
    """service x (B + 1) / 2: B requests arrive at once and run one after the other. service: ms of one request."""

    service: float
    rising = True

    def __post_init__(self) -> None:
        _positive("service", self.service)

    def latency(self, load: float) -> float:
        return self.service * (load + 1.0) / 2.0

    def latencies(self, loads: Floats) -> Floats:
        return self.service * (loads + 1.0) / 2.0

    def code(self) -> tuple[int, tuple[float, ...]]:
        return AFFINE, (self.service,)


@dataclass(frozen=True)
class Clamped:
    """As `Affine`, but never below one service time: service x (max(B, 1) + 1) / 2."""

    service: float
    rising = True

    def __post_init__(self) -> None:
        _positive("service", self.service)

    def latency(self, load: float) -> float:
        return self.service * (max(load, 1.0) + 1.0) / 2.0

    def latencies(self, loads: Floats) -> Floats:
        return self.service * (np.maximum(loads, 1.0) + 1.0) / 2.0

    def code(self) -> tuple[int, tuple[float, ...]]:
        return CLAMPED, (self.service,)


@dataclass(frozen=True)
class MD1:
    """The sojourn time of an M/D/1 queue at load r = B / most: service x (1 + r / (2 (1 - r))).

    service: ms of one request; most: requests within one SLO at full load. Beyond r = 0.98 the queueing time is
    constant, and each unit of load adds 1000 service times.
    """

    service: float
    most: float
    rising = True

    def __post_init__(self) -> None:
        _positive("service", self.service)
        _positive("most", self.most)

    def latency(self, load: float) -> float:
        share = load / self.most
        queue = min(share, FULL_LOAD)
        beyond = max(share - FULL_LOAD, 0.0)
        return self.service * (1.0 + queue / (2.0 * (1.0 - queue)) + OVERLOAD_SLOPE * beyond)

    def latencies(self, loads: Floats) -> Floats:
        share = loads / self.most
        queue = np.minimum(share, FULL_LOAD)
        beyond = np.maximum(share - FULL_LOAD, 0.0)
        waited: Floats = 1.0 + queue / (2.0 * (1.0 - queue)) + OVERLOAD_SLOPE * beyond
        return self.service * waited

    def code(self) -> tuple[int, tuple[float, ...]]:
        return QUEUE, (self.service, self.most, FULL_LOAD, OVERLOAD_SLOPE)


@dataclass(frozen=True)
class Table:
    """Measured latencies: values[B - 1] at whole B >= 1, interpolated linearly.

    Below 1 the first value holds; beyond the last value its slope continues. A single value is a constant.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values: got none; at least one latency")

    @property
    def rising(self) -> bool:
        values = np.asarray(self.values)
        if len(values) == 1:
            return bool(values[0] >= 0)
        loads = np.arange(1, len(values))
        slopes = np.diff(values)
        # B x latency is a parabola on every segment: the slope is least at one end of it.
        starts = values[:-1] + loads * slopes
        ends = values[1:] + (loads + 1) * slopes
        return bool(values[0] >= 0 and slopes[-1] >= 0 and (starts >= 0).all() and (ends >= 0).all())

    def latency(self, load: float) -> float:
        values = self.values
        if load <= 1.0 or len(values) == 1:
            return values[0]
        left = int(min(load - 1.0, len(values) - 2))
        return values[left] + (load - 1.0 - left) * (values[left + 1] - values[left])

    def latencies(self, loads: Floats) -> Floats:
        values = np.asarray(self.values)
        if len(values) == 1:
            return np.full_like(loads, values[0])
        steps = np.maximum(loads - 1.0, 0.0)
        left = np.minimum(steps, len(values) - 2).astype(np.int64)
        inside: Floats = values[left] + (steps - left) * (values[left + 1] - values[left])
        return inside

    def code(self) -> tuple[int, tuple[float, ...]]:
        return TABLE, self.values


@dataclass(frozen=True)
class Coded:
    """Curves as arrays: curve i is kinds[i] with the parameters values[starts[i] : starts[i + 1]]."""

    kinds: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    values: Floats


def encode(curves: Sequence[Curve]) -> Coded:
    """The curves in the form that compiled code uses."""
    codes = [curve.code() for curve in curves]
    return Coded(
        np.array([kind for kind, _ in codes], dtype=np.int64),
        np.cumsum([0, *(len(values) for _, values in codes)], dtype=np.int64),
        np.array([value for _, values in codes for value in values], dtype=np.float64),
    )
