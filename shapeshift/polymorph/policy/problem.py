"""Arlo's allocation problem (section 3.3, Eqs. 1-7): its data, constraints and objective.

Requests of bin i go to runtime i. Those that its N_i instances cannot serve within the SLO go to the next longer
runtime. The objective is the least mean latency of all requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shapeshift.polymorph.policy.curves import MD1, Clamped, Curve

# A cap that is exceeded by rounding only is met.
_ROUNDING = 1e-9
# Waiting requests are demand as if to be served this often between two plans.
_DRAIN = 2.0


@dataclass(frozen=True)
class Problem:
    """`gpus` instances to divide among the runtimes, shortest first; every list has one entry for each runtime.

    demand: Q_i, requests of bin i within one SLO (>= 0); capacity: M_i, requests that one instance serves
    within the SLO (>= 1); curves: L_i; cap_last: whether the last runtime, too, is limited to its capacity.
    Raises ValueError naming the field.
    """

    gpus: int
    demand: tuple[float, ...]
    capacity: tuple[float, ...]
    curves: tuple[Curve, ...]
    cap_last: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus: got {self.gpus}; at least 1")
        if not self.demand:
            raise ValueError("demand: got no runtime; at least 1")
        for name, values in (("capacity", self.capacity), ("curves", self.curves)):
            if len(values) != len(self.demand):
                raise ValueError(f"{name}: got {len(values)} values; as many as demand has ({len(self.demand)})")
        if not all(0 <= value < math.inf for value in self.demand):
            raise ValueError(f"demand: got {self.demand}; numbers of at least 0")
        if not all(1 <= value < math.inf for value in self.capacity):
            raise ValueError(f"capacity: got {self.capacity}; numbers of at least 1")

    def lower_bounds(self) -> list[int]:
        """The least N_i (Eqs. 3 and 7)."""
        bounds = [math.floor(q / m) for q, m in zip(self.demand, self.capacity, strict=True)]
        return [*bounds[:-1], max(bounds[-1], 1)]

    def served(self, counts: Sequence[int]) -> list[float]:
        """C_i, the requests that each runtime serves (Eqs. 4 and 5)."""
        left, served = 0.0, []
        for demand, capacity, count in zip(self.demand[:-1], self.capacity, counts, strict=False):
            served.append(min(left + demand, count * capacity))
            left = left + demand - served[-1]
        return [*served, left + self.demand[-1]]

    def objective(self, counts: Sequence[int]) -> float:
        """Eq. 1: the sum of the latencies (ms) of all requests within one SLO."""
        runtimes = zip(self.served(counts), counts, self.curves, strict=True)
        return sum(served * curve.latency(served / count) for served, count, curve in runtimes if served > 0)

    def met_by(self, counts: Sequence[int]) -> bool:
        """Whether the counts meet Eqs. 2, 3 and 7, and the cap where there is one."""
        bounded = all(count >= least for count, least in zip(counts, self.lower_bounds(), strict=True))
        most = counts[-1] * self.capacity[-1] * (1 + _ROUNDING)
        capped = not self.cap_last or self.served(counts)[-1] <= most
        return sum(counts) == self.gpus and bounded and capped

    def shrunk(self) -> tuple[Problem, float]:
        """The problem with its demand scaled by theta so that the lower bounds fit, and theta (at most 1)."""
        if sum(self.lower_bounds()) <= self.gpus:
            return self, 1.0
        needed = sum(q / m for q, m in zip(self.demand, self.capacity, strict=True))
        theta = (self.gpus - 1) / needed
        return replace(self, demand=tuple(theta * q for q in self.demand)), theta


def of_services(
    gpus: int, demand: Sequence[float], services: Sequence[float], horizon_ms: float, curve: str
) -> Problem:
    """The problem of instances that take `services[i]` ms for a request, with the demand of one horizon.

    curve: `clamped`, with whole requests as capacities and none of the longest runtime, as in the paper; or `md1`.
    """
    if curve == "clamped":
        whole = [float(max(1, math.floor(horizon_ms / service))) for service in services]
        return Problem(gpus, tuple(demand), tuple(whole), tuple(map(Clamped, services)))
    most = [horizon_ms / service for service in services]
    curves = tuple(MD1(service, full) for service, full in zip(services, most, strict=True))
    return Problem(gpus, tuple(demand), tuple(max(1.0, full) for full in most), curves, cap_last=True)


def backlog(outstanding: Iterable[tuple[int, int]], bins: int, share: float, curve: str) -> list[float]:
    """The waiting requests of instances, as demand of their bins.

    outstanding: (bin, requests) of each instance; share: a horizon's of the time between two plans. A queue that
    outlasts its period shows a bin whose demand, although right on average, gave it too little capacity. With curve
    `clamped` nothing waits, as in the paper.
    """
    waiting = [0.0] * bins
    times = 0.0 if curve == "clamped" else _DRAIN * share
    for index, requests in outstanding:
        # The first request of an instance runs.
        waiting[index] += times * max(requests - 1, 0)
    return waiting
