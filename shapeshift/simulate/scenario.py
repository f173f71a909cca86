"""Input and result of a simulation of Arlo's cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """The served model. edges: bins, ascending; service_ms: time of one request in each bin; slo_ms: latency objective.

    dynamic_ms: service time by number of tokens, from 0, of a single dynamic runtime (DT); None for static runtimes.
    """

    edges: tuple[int, ...]
    service_ms: tuple[float, ...]
    slo_ms: float
    dynamic_ms: tuple[float, ...] | None = None

    def single(self, dynamic_ms: Sequence[float] | None = None) -> Model:
        """The model with one runtime: padded to the longest length (ST), or dynamic (DT) with these service times."""
        dynamic = None if dynamic_ms is None else tuple(dynamic_ms)
        return Model(self.edges[-1:], self.service_ms[-1:], self.slo_ms, dynamic)

    def capacities(self) -> list[int]:
        """M_i: requests that one instance of each bin serves within the objective."""
        return [max(1, math.floor(self.slo_ms / ms)) for ms in self.service_ms]


@dataclass(frozen=True)
class Scheme:
    """The policies of the cluster.

    allocation  `even`, `global` (solved once for the whole trace) or `exact` (solved each period)
    curve       see PolymorphSettings
    dispatch    an algorithm of `polymorph.policy.dispatch`, or bin_packing
    period_s    seconds between two allocations
    change_s    seconds for which an instance is unavailable while its bin changes
    scaling     empty, `target` (Arlo) or `headroom` (INFaaS)
    scale_s     seconds between two scaling decisions
    """

    allocation: str = "exact"
    curve: str = "md1"
    dispatch: str = "earliest_finish"
    period_s: float = 120.0
    change_s: float = 1.0
    scaling: str = ""
    scale_s: float = 10.0
    min_workers: int = 1
    max_workers: int = 1000


@dataclass
class Result:
    """latency_ms: of each request, in order of arrival; counts: (time, instances by bin) after each change;
    worker_s: number of workers integrated over time; end_s: arrival of the last request."""

    latency_ms: Floats
    counts: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    worker_s: float = 0.0
    end_s: float = 0.0

    @property
    def mean_workers(self) -> float:
        """Time-weighted mean number of workers."""
        return self.worker_s / self.end_s if self.end_s else 0.0
