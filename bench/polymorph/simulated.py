"""The allocation and dispatch schemes that are compared, and the paper's large-scale comparisons as discrete events:
Tables 3 and 4 and Figs. 6 to 8, with our latencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from bench.common.output import Row
from bench.polymorph.fleet import LatencyCurve, read_curve
from bench.polymorph.traces import Traffic, capacity_per_s, draw
from shapeshift.simulate.polymorph import run
from shapeshift.simulate.scenario import Model, Result, Scheme

EDGES = tuple(range(64, 513, 64))
"""The paper's bins: every 64 tokens."""
SLO_MS = 450.0
PAPER = Scheme("exact", "clamped", "multilevel")
OURS = Scheme("exact", "md1", "earliest_finish")
# INFaaS' dispatch over fixed counts: INFaaS scales the number of instances, not their bins.
INFAAS = Scheme("global", "clamped", "bin_packing")
ALLOCATIONS: Mapping[str, Scheme] = {
    "even": replace(PAPER, allocation="even"),
    "global": replace(PAPER, allocation="global"),
    "solved, paper's curve": PAPER,
    "solved, M/D/1": replace(OURS, dispatch="multilevel"),
}
DISPATCHES: Mapping[str, Scheme] = {
    "intra-group": replace(PAPER, dispatch="intra_group"),
    "inter-group": replace(PAPER, dispatch="inter_group"),
    "Algorithm 1": PAPER,
    "earliest finish": replace(PAPER, dispatch="earliest_finish"),
}
_BALANCED = Scheme("even", dispatch="intra_group")
_DYNAMIC_SLOWER = 1.3
"""Assumed time of a dynamic engine over that of a static one of the same length: between our measurements in f32
(1.0 to 1.2) and the paper's TensorRT."""


def model(curve: LatencyCurve) -> Model:
    """The model that is simulated: the measured curve at the edges of the bins."""
    return Model(EDGES, tuple(curve.at(edge) for edge in EDGES), SLO_MS)


def tables(duration_s: float, seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Titles and rows."""
    curve = read_curve()
    bins = model(curve)
    # ST and DT: one runtime for all lengths.
    single = bins.single(), bins.single([curve.at(tokens) * _DYNAMIC_SLOWER for tokens in range(EDGES[-1] + 1)])
    systems = {
        **{name: (one, _BALANCED) for name, one in zip(("ST", "DT"), single, strict=True)},
        **_over(bins, {"INFaaS": INFAAS, "Arlo": PAPER, "ours": OURS}),
    }
    scaled = {
        name: (one, replace(scheme, scaling="target" if name in ("Arlo", "ours") else "headroom", max_workers=100))
        for name, (one, scheme) in systems.items()
    }
    steady, bursty = (Traffic(0.7, kind, 0.1, 1200.0, duration_s) for kind in (False, True))
    for title, workers, traffic, compared in (
        (
            "Table 3, allocations",
            40,
            steady,
            _over(bins, {**ALLOCATIONS, "ours": OURS}),
        ),
        ("Table 4, dispatches", 80, bursty, _over(bins, DISPATCHES)),
        ("Figs. 6 and 7, systems", 10, steady, systems),
        ("Fig. 8, autoscaling from 5 workers", 5, replace(bursty, load=0.6), scaled),
    ):
        at_s, tokens = draw(traffic, capacity_per_s(curve, EDGES, workers), seed)
        rows = [row(name, run(one, workers, at_s, tokens, scheme)) for name, (one, scheme) in compared.items()]
        yield f"{title}: {workers} workers, {traffic}", rows


def _over(one: Model, schemes: Mapping[str, Scheme]) -> dict[str, tuple[Model, Scheme]]:
    return {name: (one, scheme) for name, scheme in schemes.items()}


def row(name: str, result: Result) -> Row:
    """A simulated system."""
    return {
        "scheme": name,
        "mean_ms": float(result.latency_ms.mean()),
        "p98_ms": float(np.percentile(result.latency_ms, 98)),
        "workers": result.mean_workers,
        "requests": len(result.latency_ms),
    }
