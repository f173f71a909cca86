"""The allocation and dispatch schemes that are compared, and the paper's large-scale comparisons as discrete events:
Tables 3 and 4 and Figs. 6 to 8, with our latencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.common.output import Row
from bench.polymorph.fleet import PROFILE, read_curve
from bench.polymorph.traces import Traffic, capacity_per_s
from shapeshift.engines.manifest import Manifest
from shapeshift.simulate import planner, profile
from shapeshift.simulate.planner import Pace, Served
from shapeshift.workloads.trace import Trace

EDGES = tuple(range(64, 513, 64))
"""The paper's bins: every 64 tokens."""
SLO_MS = 450.0
Scheme = Mapping[str, str]
"""Parameters of the front."""


def _scheme(allocation: str, curve: str, dispatch: str) -> Scheme:
    return {"allocation": allocation, "curve": curve, "dispatch": dispatch}


PAPER = _scheme("exact", "clamped", "multilevel")
OURS = _scheme("exact", "md1", "earliest_finish")
# INFaaS' dispatch over fixed counts: INFaaS scales the number of instances, not their bins.
INFAAS = _scheme("global", "clamped", "bin_packing")
ALLOCATIONS: Mapping[str, Scheme] = {
    "even": {**PAPER, "allocation": "even"},
    "global": {**PAPER, "allocation": "global"},
    "solved, paper's curve": PAPER,
    "solved, M/D/1": {**OURS, "dispatch": "multilevel"},
}
DISPATCHES: Mapping[str, Scheme] = {
    "intra-group": {**PAPER, "dispatch": "intra_group"},
    "inter-group": {**PAPER, "dispatch": "inter_group"},
    "Algorithm 1": PAPER,
    "earliest finish": {**PAPER, "dispatch": "earliest_finish"},
}
_BALANCED = _scheme("even", "md1", "intra_group")
_DYNAMIC_SLOWER = 1.3
"""Assumed time of a dynamic engine over that of a static one of the same length: between our measurements in f32
(1.0 to 1.2) and the paper's TensorRT."""


@dataclass(frozen=True)
class System:
    """A scheme over engines of these bins. dynamic: one engine for any length instead of one for each bin."""

    scheme: Scheme
    edges: Sequence[int] = EDGES
    dynamic: bool = False
    pace: Pace = Pace()

    def engines(self) -> Manifest:
        """The engines, which take one text at a time, as in the paper."""
        measured = profile.read(PROFILE)
        if self.dynamic:
            return profile.engines(measured, (), packing=False, factor=_DYNAMIC_SLOWER)
        return profile.engines(measured, self.edges, dynamic=False, packing=False)

    def run(self, workers: int, trace: Trace, **parameters: object) -> Served:
        """Serve a trace by so many workers at first."""
        every = {"queue_rows": 10**6, "max_queue_ms": 0, "placement": "partitioned", "slo_ms": SLO_MS}
        values = {**every, "workers": workers, **self.scheme, **parameters}
        weights = profile.weights(self.edges, trace.length)
        engines = self.engines()
        return planner.run(profile.front(values, engines, self.edges, weights), engines, trace, self.pace)


def tables(duration_s: float, seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Titles and rows."""
    curve = read_curve()
    # ST and DT: one runtime for all lengths.
    systems = {
        "ST": System(_BALANCED, EDGES[-1:]),
        "DT": System(_BALANCED, EDGES[-1:], dynamic=True),
        **_over({"INFaaS": INFAAS, "Arlo": PAPER, "ours": OURS}),
    }
    scaled = {
        name: system if name in ("Arlo", "ours") else replace(system, pace=Pace(scaling="headroom"))
        for name, system in systems.items()
    }
    limits = {"min_workers": 1, "max_workers": 100}
    steady, bursty = (Traffic(0.7, kind, 0.1, 1200.0, duration_s) for kind in (False, True))
    for title, workers, traffic, compared, parameters in (
        ("Table 3, allocations", 40, steady, _over({**ALLOCATIONS, "ours": OURS}), {}),
        ("Table 4, dispatches", 80, bursty, _over(DISPATCHES), {}),
        ("Figs. 6 and 7, systems", 10, steady, systems, {}),
        ("Fig. 8, autoscaling from 5 workers", 5, replace(bursty, load=0.6), scaled, limits),
    ):
        trace = traffic.draw(capacity_per_s(curve, EDGES, workers), seed)
        rows = [row(name, system.run(workers, trace, **parameters)) for name, system in compared.items()]
        yield f"{title}: {workers} workers, {traffic}", rows


def _over(schemes: Mapping[str, Scheme]) -> dict[str, System]:
    return {name: System(scheme) for name, scheme in schemes.items()}


def row(name: str, served: Served) -> Row:
    """A simulated system."""
    return {
        "scheme": name,
        "mean_ms": float(np.nanmean(served.latency_ms)),
        "p98_ms": float(np.nanpercentile(served.latency_ms, 98)),
        "workers": served.mean_workers,
        "requests": len(served.latency_ms),
    }
