"""The time of Arlo's decisions: an allocation, exact and by Gurobi (one core each), and a dispatch."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import time

import numpy as np

from client import hardware
from client.report import head
from shapeshift.polymorph.policy.allocate import allocate
from shapeshift.polymorph.policy.curves import MD1, Affine
from shapeshift.polymorph.policy.dispatch import SCORED, Rules
from shapeshift.polymorph.policy.dispatcher import Dispatcher
from shapeshift.polymorph.policy.problem import Problem

SIZES = ((50, 8), (200, 12), (1000, 16))
LOADS = (0.5, 0.7, 0.9)
LEVELS, INSTANCES = 12, 100


def cluster(rng: np.random.Generator, gpus: int, runtimes: int, load: float, kind: str) -> Problem:
    """Equal bins up to 512, latencies as in the paper's Fig. 2a, SLO 150 ms, lognormal lengths; md1: capped."""
    edges = np.arange(1, runtimes + 1) * 512 / runtimes
    service = np.maximum(1.15 * (1 + 3.22 * (edges - 64) / 448), 0.5)
    capacity = np.floor(150.0 / service)
    lengths = rng.lognormal(np.log(rng.uniform(40, 100)), rng.uniform(0.6, 1.0), 20_000)
    share = np.bincount(np.minimum(np.searchsorted(edges, lengths), runtimes - 1), minlength=runtimes) / len(lengths)
    demand = share * load * gpus / (share / capacity).sum()
    curves = [Affine(ms) if kind == "affine" else MD1(ms, most) for ms, most in zip(service, capacity, strict=True)]
    return Problem(gpus, tuple(demand.tolist()), tuple(capacity.tolist()), tuple(curves), kind == "md1")


def dispatch_us(algorithm: str, steps: int, seed: int) -> list[float]:
    """Microseconds of each dispatch, including the update of the counters, at about four requests an instance."""
    rng = random.Random(seed)
    lengths = [512 * (level + 1) // LEVELS for level in range(LEVELS)]
    made: Dispatcher[int] = Dispatcher(lengths, [1.0 + end / 128 for end in lengths], Rules(algorithm))
    for one in range(LEVELS * INSTANCES):
        made.add(one // INSTANCES, one, 8.0)
    running, times = [], []
    for _ in range(steps):
        length = min(int(rng.lognormvariate(4.1, 0.8)) + 1, 512)
        before = time.perf_counter_ns()
        chosen = made.dispatch(length)
        times.append((time.perf_counter_ns() - before) / 1e3)
        running += [chosen[1]] if chosen else []
        if len(running) > 4 * LEVELS * INSTANCES:
            made.finish(running.pop(rng.randrange(len(running))))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.polymorph.decision_times", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="problems a row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(head({"settings": vars(options), "hardware": hardware.describe()}))
    print("\nallocation, ms: median and max; then the largest objective of exact over Gurobi's")
    for kind, (gpus, runtimes), load in itertools.product(("affine", "md1"), SIZES, LOADS):
        rng = np.random.default_rng(options.seed)
        problems = [cluster(rng, gpus, runtimes, load, kind) for _ in range(options.runs)]
        solvers = ["exact", *["gurobi"] * bool(kind == "affine" and importlib.util.find_spec("gurobipy"))]
        answers = np.array([[(a.solve_ms, a.objective) for a in (allocate(p, s) for p in problems)] for s in solvers])
        text = f"  {kind:7}{gpus:5} GPUs {runtimes:2} runtimes load {load}"
        for solver, ms in zip(solvers, answers[..., 0], strict=True):
            text += f"   {solver} {np.median(ms):7.2f} {ms.max():7.2f}"
        print(text + (f"   {(answers[0, :, 1] / answers[1, :, 1]).max():.9f}" if len(solvers) > 1 else ""))
    print(f"\ndispatch over {LEVELS} x {INSTANCES} instances, us: median, p99, max")
    for algorithm in SCORED:
        us = dispatch_us(algorithm, 50_000, options.seed)
        print(f"  {algorithm:16}{np.median(us):8.2f}{np.percentile(us, 99):8.2f}{max(us):12.2f}")


if __name__ == "__main__":
    main()
