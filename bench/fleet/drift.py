"""One allocation for all nodes against each node for itself, under lengths that drift; simulated with the policies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.common.output import Output, progress
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
    output.say(f"\nsimulated: {_NODES} nodes with {_WORKERS} workers each, bins of 64 tokens, {_TRAFFIC}; ms")
    head = f"{'one for all: mean':>19}{'p98':>8}{'each for itself: mean':>23}{'p98':>9}{'ratio of p98':>14}"
    output.say(f"  {'':8}{'draw':>5}{head}")
    rows = []
    for name, traffic in _CASES.items():
        for seed in draws:
            progress(f"drift: {name}, draw {seed}")
            together, apart = latencies(traffic, seed)
            ratio = _p98(together) / _p98(apart)
            rows.append({"traffic": str(traffic), "seed": seed, "together": _p98(together), "apart": _p98(apart)})
            output.say(
                f"  {name:8}{seed:5}{together.mean():19.1f}{_p98(together):8.1f}"
                f"{apart.mean():23.1f}{_p98(apart):9.1f}{ratio:14.2f}"
            )
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
        own = node_of == node
        apart[own] = run(served, _WORKERS, at_s[own], tokens[own], scheme).latency_ms
    return together, apart


def _p98(found: Floats) -> float:
    return float(np.percentile(found, 98))
