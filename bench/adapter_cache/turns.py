"""Two systems in one server that serve the same draws of requests in turn, several times.

If the machine is fast at one time and slow at another, both systems are affected alike, and the time of a request is
the median of its repeats. A draw repeats only after all others, so that the caches have changed by then.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bench.adapter_cache import report
from bench.adapter_cache.report import DEFAULT, PLAIN, AdapterRun
from bench.adapter_cache.server import PARTS, ServerBench
from bench.common.output import Row, progress, table

_WARM = 60
"""Unmeasured requests that fill the caches."""


def measure(
    bench: ServerBench, rate: float, draws: int, repeats: int, count: int, seed: int
) -> dict[str, Mapping[int, list[AdapterRun]]]:
    """The runs of each draw, of the default and of `fifo` without a cache. count: requests of a draw."""
    names = [PLAIN, DEFAULT]
    loads = [bench.load(rate, count, seed, draw, 2) for draw in range(draws)]
    runs: dict[str, Mapping[int, list[AdapterRun]]] = {name: {draw: [] for draw in range(draws)} for name in names}
    with bench.serving({name: PARTS[name] for name in names}) as served:
        for name in names:
            served[name].streams.replay(bench.load(1e6, _WARM, seed, draws, 2))
        for repeat in range(repeats):
            for draw, load in enumerate(loads):
                for name in names if (repeat + draw) % 2 else reversed(names):
                    run = bench.run(served[name], load)
                    runs[name][draw].append(run)
                    progress(f"repeat {repeat}, draw {draw}, {name}: p99 {report.first_ms([run], 99):.0f} ms")
    return runs


def tables(title: str, runs: Mapping[str, Mapping[int, list[AdapterRun]]]) -> str:
    """All runs, the median of each request, and draw by draw."""
    every = {name: [one for of_draw in draws.values() for one in of_draw] for name, draws in runs.items()}
    medians = {name: [report.typical(of_draw) for of_draw in draws.values()] for name, draws in runs.items()}
    pairs = zip(medians[DEFAULT], medians[PLAIN], strict=True)
    ratios = np.array([report.first_ms([ours], 99) / report.first_ms([theirs], 99) for ours, theirs in pairs])
    rows: list[Row] = []
    for draw, ratio in enumerate(ratios.tolist()):
        shown = {name: " ".join(f"{report.first_ms([run], 99):.0f}" for run in runs[name][draw]) for name in runs}
        rows.append({"draw": str(draw), **shown, "ratio of the medians": ratio})
    value, low, high = report.geometric_mean(ratios)
    return "\n".join(
        [
            report.systems_table(f"{title}, all runs", every),
            report.systems_table(f"{title}, the median of each request", medians),
            table(f"{DEFAULT} over {PLAIN}", report.ratios(medians[DEFAULT], medians[PLAIN])),
            table("draw by draw, p99 of the first token of each run, ms", rows),
            f"  geometric mean of the draws' ratios {value:.2f}  ({low:.2f} to {high:.2f})",
        ]
    )
