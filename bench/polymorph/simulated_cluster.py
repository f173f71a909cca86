"""The paper's large-scale comparisons as discrete events: Tables 3 and 4, Figs. 6 to 9, with our latencies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bench.common.output import Row
from bench.polymorph.emulated_server import SLO_MS, edges
from bench.polymorph.fleet import LatencyCurve, read_curve
from bench.polymorph.schemes import ALLOCATIONS, DISPATCHES, INFAAS, OURS, PAPER, SchemeSettings, model
from bench.polymorph.traces import Traffic, capacity_per_s, draw
from shapeshift.simulate.polymorph import run
from shapeshift.simulate.scenario import Model, Result, Scheme

_PERIOD_S, _CHANGE_S = 120.0, 1.0
_DYNAMIC_SLOWER = 1.3
"""Assumed time of a dynamic engine over that of a static one of the same length: between our measurements in f32
(1.0 to 1.2) and the paper's TensorRT."""


def tables(duration_s: float, seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Titles and rows."""
    curve = read_curve()
    workers = 40
    for load, drift in ((0.6, 0.1), (0.7, 0.2), (0.8, 0.1)):
        traffic = Traffic(load, drift=drift, drift_s=1200.0, duration_s=duration_s)
        rows = [_row(name, _serve(curve, workers, traffic, seed, settings)) for name, settings in ALLOCATIONS.items()]
        rows.append(_row("ours", _serve(curve, workers, traffic, seed, OURS)))
        yield f"Table 3, allocations: {workers} workers, {traffic}", rows
    for count in (25, 80):
        traffic = Traffic(0.7, bursty=True, drift=0.1, drift_s=1200.0, duration_s=duration_s)
        for label, settings in (("paper's", PAPER), ("M/D/1", OURS)):
            rows = [
                _row(name, _serve(curve, count, traffic, seed, replace(settings, dispatch=algorithm)))
                for name, algorithm in DISPATCHES.items()
            ]
            yield f"Table 4, dispatches on the {label} allocation: {count} workers, {traffic}", rows
    for load in (0.5, 0.7, 0.8):
        traffic = Traffic(load, drift=0.1, drift_s=1200.0, duration_s=duration_s)
        yield f"Figs. 6 and 7: 10 workers, {traffic}", list(_systems(curve, 10, traffic, seed))
    traffic = Traffic(0.6, bursty=True, drift=0.1, drift_s=1200.0, duration_s=duration_s)
    yield f"Fig. 8, autoscaling from 5 workers: {traffic}", list(_scaled(curve, 5, traffic, seed))
    rows = []
    for number in (2, 4, 8, 16):
        step = 512 // number
        bins = tuple(range(step, 513, step))
        rows.append(_row(f"{number} bins", _serve(curve, workers, traffic, seed, OURS, bins)))
    yield f"Fig. 9 (11 in print), number of bins: {workers} workers, {traffic}", rows


def _serve(
    curve: LatencyCurve,
    workers: int,
    traffic: Traffic,
    seed: int,
    settings: SchemeSettings,
    bins: tuple[int, ...] | None = None,
) -> Result:
    at_s, tokens = draw(traffic, capacity_per_s(curve, edges(), workers), seed)
    served = model(curve, bins or edges(), SLO_MS)
    return run(served, workers, at_s, tokens, settings.simulated(_PERIOD_S, _CHANGE_S))


def _single(curve: LatencyCurve) -> dict[str, Model]:
    """ST and DT: one runtime for all lengths."""
    whole = model(curve, edges(), SLO_MS)
    dynamic = [curve.at(tokens) * _DYNAMIC_SLOWER for tokens in range(edges()[-1] + 1)]
    return {"ST": whole.single(), "DT": whole.single(dynamic)}


def _systems(curve: LatencyCurve, workers: int, traffic: Traffic, seed: int) -> Iterator[Row]:
    at_s, tokens = draw(traffic, capacity_per_s(curve, edges(), workers), seed)
    balanced = Scheme("even", dispatch="intra_group")
    for name, single in _single(curve).items():
        yield _row(name, run(single, workers, at_s, tokens, balanced))
    for name, settings in {"INFaaS": INFAAS, "Arlo": PAPER, "ours": OURS}.items():
        yield _row(name, _serve(curve, workers, traffic, seed, settings))


def _scaled(curve: LatencyCurve, workers: int, traffic: Traffic, seed: int) -> Iterator[Row]:
    at_s, tokens = draw(traffic, capacity_per_s(curve, edges(), workers), seed)
    headroom = Scheme("even", dispatch="intra_group", scaling="headroom", max_workers=100)
    for name, single in _single(curve).items():
        yield _row(name, run(single, workers, at_s, tokens, headroom))
    whole = model(curve, edges(), SLO_MS)
    for name, settings, scaling in (
        ("INFaaS", INFAAS, "headroom"),
        ("Arlo", PAPER, "target"),
        ("ours", OURS, "target"),
    ):
        scheme = replace(settings.simulated(_PERIOD_S, _CHANGE_S), scaling=scaling, max_workers=100)
        yield _row(name, run(whole, workers, at_s, tokens, scheme))


def _row(name: str, result: Result) -> Row:
    return {
        "scheme": name,
        "mean_ms": float(result.latency_ms.mean()),
        "p98_ms": float(np.percentile(result.latency_ms, 98)),
        "workers": result.mean_workers,
        "requests": len(result.latency_ms),
    }
