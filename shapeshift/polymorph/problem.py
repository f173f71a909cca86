"""Arlo's allocation problem (section 3.3, Eqs. 1-7): what is given, what the constraints and the objective are.

Requests of bin i go to runtime i; what its N_i instances cannot serve within the SLO goes on to the next longer
one. The mean latency of all requests is to be least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shapeshift.polymorph.curves import Curve

# A cap that is overstepped by no more than rounding is met.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """One allocation: `gpus` instances for the runtimes, shortest first; all lists have one entry a runtime.

    demand: Q_i, requests of bin i within one SLO (>= 0); capacity: M_i, requests that one instance serves
    within the SLO (>= 1); curves: L_i. cap_last: the last runtime, too, serves no more than its capacity.
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
        """Eq. 1: the latencies (ms) of all requests within one SLO, summed. A runtime that serves none adds none."""
        terms = zip(self.served(counts), counts, self.curves, strict=True)
        return sum(served * curve.latency(served / count) for served, count, curve in terms if served > 0)

    def met_by(self, counts: Sequence[int]) -> bool:
        """Whether the counts keep Eqs. 2, 3 and 7, and the cap where there is one."""
        bounded = all(count >= least for count, least in zip(counts, self.lower_bounds(), strict=True))
        most = counts[-1] * self.capacity[-1] * (1 + _ROUNDING)
        capped = not self.cap_last or self.served(counts)[-1] <= most
        return sum(counts) == self.gpus and bounded and capped

    def shrunk(self) -> tuple[Problem, float]:
        """The problem with its demand scaled by theta, so that the lower bounds fit, and theta; 1 where they do."""
        if sum(self.lower_bounds()) <= self.gpus:
            return self, 1.0
        needed = sum(q / m for q, m in zip(self.demand, self.capacity, strict=True))
        theta = (self.gpus - 1) / needed
        return replace(self, demand=tuple(theta * q for q in self.demand)), theta
