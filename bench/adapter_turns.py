"""Two systems in one server that serve the same draws of requests in turn, over and over.

What a benchmark that serves one system after the other cannot tell from the gain, a machine that is now fast and now
slow, falls on both here, and a request's time is the median of several. No draw comes again before all others have
come, so that caches do not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench import adapter_report as report
from bench.adapter_report import DEFAULT, PLAIN, Outcome
from bench.adapter_server import PARTS, Bench

_WARM = 60
"""Requests that fill the caches first."""


@dataclass(frozen=True)
class Turns:
    """How much is measured: `draws` of `count` requests, `repeats` times each."""

    draws: int
    repeats: int
    count: int


def measure(
    bench: Bench, rate: float, turns: Turns, seed: int, say: Callable[[str], None]
) -> dict[str, Mapping[int, list[Outcome]]]:
    """Of the default and of `fifo` without a cache, the runs of each draw."""
    names = [PLAIN, DEFAULT]
    loads = [bench.load(rate, turns.count, seed, draw, 2) for draw in range(turns.draws)]
    runs: dict[str, Mapping[int, list[Outcome]]] = {name: {draw: [] for draw in range(turns.draws)} for name in names}
    with bench.serving({name: PARTS[name] for name in names}) as served:
        for name in names:
            served[name].streams.replay(bench.load(1e6, _WARM, seed, turns.draws, 2))
        for repeat in range(turns.repeats):
            for draw, load in enumerate(loads):
                for name in names if (repeat + draw) % 2 else reversed(names):
                    outcome = bench.run(served[name], load)
                    runs[name][draw].append(outcome)
                    say(f"repeat {repeat}, draw {draw}, {name}: p99 {report.first_ms([outcome], 99):.0f} ms")
    return runs


def table(title: str, runs: Mapping[str, Mapping[int, list[Outcome]]]) -> str:
    """What they came to: all runs, each request's median, and draw by draw."""
    every = {name: [one for of_draw in draws.values() for one in of_draw] for name, draws in runs.items()}
    medians = {name: [report.typical(of_draw) for of_draw in draws.values()] for name, draws in runs.items()}
    lines = [
        report.table(f"{title}, all runs", every),
        report.table(f"{title}, the median of each request", medians),
        report.by_rank(medians[DEFAULT], medians[PLAIN], (DEFAULT, PLAIN)),
        f"  draw by draw, p99 of each run in ms and over that of the medians: {DEFAULT}, {PLAIN}, ratio",
    ]
    pairs = zip(medians[DEFAULT], medians[PLAIN], strict=True)
    ratios = np.array([report.first_ms([ours], 99) / report.first_ms([theirs], 99) for ours, theirs in pairs])
    for draw, ratio in enumerate(ratios):
        shown = "   ".join(_p99s(runs[name][draw]) for name in (DEFAULT, PLAIN))
        lines.append(f"    {draw:3}  {shown}  {ratio:5.2f}")
    value, low, high = report.geometric_mean(ratios)
    lines.append(f"  geometric mean of the draws' ratios {value:.2f}  ({low:.2f} to {high:.2f})")
    return "\n".join(lines)


def _p99s(runs: Sequence[Outcome]) -> str:
    return " ".join(f"{report.first_ms([run], 99):6.0f}" for run in runs)
