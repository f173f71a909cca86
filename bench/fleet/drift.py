"""One allocation for all nodes against each node for itself, under lengths that drift; simulated with the policies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.common.output import Output, Row, progress
from bench.polymorph.emulated_server import SLO_MS, edges
from bench.polymorph.fleet import read_curve
from bench.polymorph.schemes import OURS, model
from bench.polymorph.traces import Traffic, capacity_per_s, draw
from shapeshift.simulate.polymorph import run
from shapeshift.simulate.scenario import Floats

_NODES, _WORKERS = 3, 8
_PERIOD_S, _CHANGE_S = 120.0, 1.0
_TRAFFIC = Traffic(0.7, drift=0.1, drift_s=600.0, duration_s=600.0)
_CASES = {"stable": _TRAFFIC, "bursty": replace(_TRAFFIC, bursty=True)}


def measure(output: Output, quick: bool) -> None:
    """Print a row for each kind of traffic and draw; the same requests for both, a third of them at each node."""
    draws = range(1 if quick else 5)
    rows: list[Row] = []
    for name, traffic in _CASES.items():
        for seed in draws:
            progress(f"drift: {name}, draw {seed}")
            row: dict[str, object] = {"arrivals": name, "draw": seed}
            p98 = []
            for what, ms in zip(("one plan", "each for itself"), latencies(traffic, seed), strict=True):
                p98.append(float(np.percentile(ms, 98)))
                row |= {f"{what}: mean": float(ms.mean()), f"{what}: p98": p98[-1]}
            rows.append({**row, "ratio of p98": p98[0] / p98[1]})
    output.table(f"simulated: {_NODES} nodes with {_WORKERS} workers each, bins of 64 tokens, {_TRAFFIC}; ms", rows)
    output.data["drift"] = rows


def latencies(traffic: Traffic, seed: int) -> tuple[Floats, Floats]:
    """Of every request, ms: with all workers in one plan behind all fronts, and with each node's own."""
    curve = read_curve()
    at_s, tokens = draw(traffic, capacity_per_s(curve, edges(), _NODES * _WORKERS), seed)
    served, scheme = model(curve, edges(), SLO_MS), OURS.simulated(_PERIOD_S, _CHANGE_S)
    together = run(served, _NODES * _WORKERS, at_s, tokens, scheme).latency_ms
    node_of = np.random.default_rng(seed).integers(0, _NODES, len(at_s))
    apart = np.zeros(len(at_s))
    for node in range(_NODES):
        here = node_of == node
        apart[here] = run(served, _WORKERS, at_s[here], tokens[here], scheme).latency_ms
    return together, apart
