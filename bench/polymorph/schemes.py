"""The allocation and dispatch schemes that are compared, and their simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.common.output import Row
from bench.polymorph.fleet import LatencyCurve
from shapeshift.simulate import profile
from shapeshift.simulate.planner import Pace, Served
from shapeshift.simulate.systems import TextSystem
from shapeshift.workloads.trace import Trace

EDGES = tuple(range(64, 513, 64))
"""The paper's bins: every 64 tokens."""
SLO_MS = 450.0
Scheme = Mapping[str, str]
"""Parameters of the front."""


def scheme(allocation: str, curve: str, dispatch: str) -> Scheme:
    """The parameters of a scheme."""
    return {"allocation": allocation, "curve": curve, "dispatch": dispatch}


PAPER = scheme("exact", "clamped", "multilevel")
OURS = scheme("exact", "md1", "earliest_finish")
# INFaaS' dispatch over fixed counts: INFaaS scales the number of instances, not their bins.
INFAAS = scheme("global", "clamped", "bin_packing")
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


@dataclass(frozen=True)
class System:
    """A scheme over engines of these bins; or, with `dynamic`, over one for any length that is so much slower."""

    scheme: Scheme
    edges: Sequence[int] = EDGES
    dynamic: float = 0.0
    pace: Pace = Pace()

    def over(self, curve: LatencyCurve, workers: int, trace: Trace, **parameters: object) -> Served:
        """Serve a trace by so many workers at first, which take one text at a time, as in the paper."""
        measured = {"lengths": curve.lengths, "latency_ms": curve.latency_ms}
        edges = () if self.dynamic else self.edges
        engines = profile.engines(measured, edges, bool(self.dynamic), packing=False, factor=self.dynamic or 1.0)
        every = {"queue_rows": 10**9, "max_queue_ms": 0, "placement": "partitioned", "slo_ms": SLO_MS}
        values = {**every, "workers": workers, **self.scheme, **parameters}
        texts = {name: str(value) for name, value in values.items()}
        return TextSystem(texts, engines, self.edges, 1, self.pace).run(trace)


def row(name: str, served: Served) -> Row:
    """A simulated system."""
    return {
        "scheme": name,
        "mean_ms": float(np.nanmean(served.latency_ms)),
        "p98_ms": float(np.nanpercentile(served.latency_ms, 98)),
        "workers": served.mean_workers,
        "requests": len(served.latency_ms),
    }
