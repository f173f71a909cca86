"""What a simulation of Arlo's cluster is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """What is served. edges: bins, ascending; service_ms: of one request in each; slo_ms: latency objective.

    dynamic_ms: by tokens 0.. for a single runtime whose time follows the length (DT); None where it is the bin's.
    """

    edges: tuple[int, ...]
    service_ms: tuple[float, ...]
    slo_ms: float
    dynamic_ms: tuple[float, ...] | None = None

    def single(self, dynamic_ms: Sequence[float] | None = None) -> Model:
        """One runtime alone: padded to the longest length (ST), or following the length (DT)."""
        given = None if dynamic_ms is None else tuple(dynamic_ms)
        return Model(self.edges[-1:], self.service_ms[-1:], self.slo_ms, given)

    def capacities(self) -> list[int]:
        """M_i: requests that one instance serves within the objective."""
        return [max(1, math.floor(self.slo_ms / ms)) for ms in self.service_ms]


@dataclass(frozen=True)
class Scheme:
    """How it is served.

    allocation: `even`, `global` (solved once, for the whole trace) or `exact` (each period); curve, cap_last, drain:
    see PolymorphSettings; dispatch: an algorithm of `dispatch`, or bin_packing; period_s: between allocations;
    change_s: for how long an instance that changes its bin is away; scaling: none, `target` (Arlo) or
    `headroom` (INFaaS), decided every scale_s seconds.
    """

    allocation: str = "exact"
    curve: str = "md1"
    cap_last: bool = True
    drain: float = 2.0
    dispatch: str = "earliest_finish"
    period_s: float = 120.0
    change_s: float = 1.0
    scaling: str = ""
    scale_s: float = 10.0
    min_workers: int = 1
    max_workers: int = 1000


@dataclass
class Result:
    """latency_ms: of each request, in order of arrival; counts: (instant, instances by bin) at each change;
    worker_s: workers, integrated over time; end_s: when the last request came."""

    latency_ms: Floats
    counts: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    worker_s: float = 0.0
    end_s: float = 0.0

    @property
    def mean_workers(self) -> float:
        """Time-weighted number of workers."""
        return self.worker_s / self.end_s if self.end_s else 0.0
