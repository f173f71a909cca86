"""From 10 to 10,000 workers: what one front's queues, dispatcher, planner and simulation bear; docs/scale.md shows it.

The latencies are those of `bench.papers.arlo`.
"""

from __future__ import annotations

import resource
import time

import numpy as np

from bench.papers.arlo import LARGE, SLO_MS
from bench.papers.findings import Findings
from bench.polymorph.schemes import EDGES, OURS, PAPER, System
from bench.polymorph.traces import Traffic, capacity_per_s
from shapeshift.polymorph.policy import problem
from shapeshift.polymorph.policy.allocate import allocate
from shapeshift.simulate.planner import Pace
from shapeshift.workloads import lengths

WORKERS = (10, 100, 1_000, 10_000)
_TEXTS, _EACH = 100_000, 50
"""Of a run at least, and of each worker."""
_LOADS = (0.7, 0.8, 0.9)
_PACE = Pace(plan_period_s=30.0)


def measure(findings: Findings, seed: int) -> None:
    """A row for each number of workers."""
    services = [LARGE.at(edge) for edge in EDGES]
    sample = lengths.long().sample(np.random.default_rng(seed), 20_000)
    shares = np.bincount(np.searchsorted(EDGES, sample), minlength=len(EDGES)) / len(sample)
    waits: list[dict[str, float]] = []
    costs: list[dict[str, float]] = []
    for workers in WORKERS:
        per_s = capacity_per_s(LARGE, EDGES, workers)
        row: dict[str, float] = {"workers": workers}
        spent, served = 0.0, 0
        for load in _LOADS:
            for name, scheme in (("paper's", PAPER), ("ours", OURS)):
                if name != "ours" and load != _LOADS[0]:
                    continue
                seconds = max(_TEXTS, _EACH * workers) * findings.scale / (per_s * load)
                trace = Traffic(load, drift=0.0, duration_s=seconds).draw(per_s, seed)
                began = time.process_time()
                result = System(scheme, pace=_PACE).over(LARGE, workers, trace, slo_ms=SLO_MS[LARGE])
                spent, served = spent + time.process_time() - began, served + len(trace)
                row[f"{name} p98 ms, {load:.0%}"] = float(np.nanpercentile(result.latency_ms, 98))
        waits.append(row)
        demand = (shares * per_s * 0.7 * SLO_MS[LARGE] / 1e3).tolist()
        planned = [
            allocate(problem.of_services(workers, demand, services, SLO_MS[LARGE], "md1")).solve_ms for _ in range(5)
        ]
        costs.append(
            {
                "workers": workers,
                "texts/s at 70%": per_s * 0.7,
                "a plan, ms": float(np.median(planned)),
                "simulated texts/s": served / spent,
                "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    findings.table("latency", "stable load", waits)
    findings.table("cost", "of planning and of simulation, one core", costs)
