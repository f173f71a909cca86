"""Tables and ratios of `bench.fused_decode`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.fused_decode import beams
from bench.fused_decode.bound import Machine, Model, least_seconds
from bench.fused_decode.cells import (
    ALONE,
    BUSY,
    CONTINUOUS,
    INSTANCES,
    OURS,
    RUNTIMES,
    STATIC,
    TRITON,
    UNARY,
    DecodeBench,
)
from bench.fused_decode.loads import PAPER_FASTER, PAPER_ITERATIONS, PAPER_NEW, PROMPT, Run, agreement, median

_COMPARED = 16
"""Tokens of each answer that are compared between systems."""
_PAPER_SLOWER = {8: 1.03, 32: 1.08}
"""Time of a request among so many over one alone, on the paper's A100 (Fig. 4c)."""
_HEADING = (
    f"  {'':24}{'tokens/s':>9}{'first ms':>10}{'p98':>8}{'between ms':>11}{'p98':>8}{'request ms':>11}{'foreign':>9}"
)


@dataclass(frozen=True)
class Limits:
    """The bound of this machine with this model."""

    machine: Machine
    model: Model
    precision: str
    kv_precision: str = "auto"
    prompt: int = PROMPT

    def seconds(self, count: int, new_tokens: int) -> float:
        """The least time for `count` requests at once."""
        return least_seconds(
            self.machine, self.model, self.precision, self.prompt, [new_tokens] * count, self.kv_precision
        )


def cells(bench: DecodeBench, limits: Limits) -> list[dict[str, Any]]:
    """Every cell as a plain record of medians over its rounds; the last record holds the machine's rates."""
    rates = {"gemm_gflops": round(limits.machine.flops / 1e9, 1), "read_gbytes": round(limits.machine.read / 1e9, 1)}
    return [{"load": load, "system": system, **_cell(runs)} for (load, system), runs in bench.runs.items()] + [rates]


def _cell(runs: list[Run]) -> dict[str, Any]:
    def p98(name: str) -> float:
        return median([float(np.percentile(getattr(run, name), 98)) for run in runs])

    def mean(name: str) -> float:
        return median([float(getattr(run, name).mean()) for run in runs])

    extra = {name: median([run.replayed.extra[name] for run in runs]) for name in runs[0].replayed.extra}
    return {
        "rounds": len(runs),
        "tokens_per_second": median([run.tokens_per_second for run in runs]),
        "first_token_ms": mean("first_token_ms"),
        "first_token_p98_ms": p98("first_token_ms"),
        "between_ms": mean("between_ms"),
        "between_p98_ms": p98("between_ms"),
        "latency_ms": mean("latency_ms"),
        "foreign": median([run.foreign for run in runs]),
        **extra,
    }


def tables(bench: DecodeBench, limits: Limits) -> str:
    """All cells, the ratios that matter, and the paper's Fig. 5."""
    lines = [
        "",
        f"bound: {limits.machine.flops / 1e9:.0f} GFLOP/s of matrix products in {limits.precision}, "
        f"{limits.machine.read / 1e9:.1f} GB/s of reading memory",
    ]
    for load in dict.fromkeys(load for load, _ in bench.runs):
        lines += ["", load, _HEADING]
        lines += [_line(system, _cell(runs)) for (name, system), runs in bench.runs.items() if name == load]
    lines += ["", f"ratios, {limits.precision}"]
    lines += [f"  {what:76} {value:8.2f}   {goal}".rstrip() for what, value, goal in ratios(bench, limits)]
    if bench.poisson:
        lines += ["", *_fig5(bench)]
    if bench.skipped:
        lines += ["", "not measured, out of time: " + "; ".join(bench.skipped)]
    return "\n".join(lines)


def _line(system: str, cell: dict[str, Any]) -> str:
    return (
        f"  {system:24}{cell['tokens_per_second']:9.1f}{cell['first_token_ms']:10.1f}{cell['first_token_p98_ms']:8.0f}"
        f"{cell['between_ms']:11.2f}{cell['between_p98_ms']:8.1f}{cell['latency_ms']:11.0f}{cell['foreign']:9.0%}"
    )


def ratios(bench: DecodeBench, limits: Limits) -> Iterator[tuple[str, float, str]]:
    """Each ratio, its value and its goal, if its cells were measured."""
    if bench.has(f"{bench.scale.requests} at once", OURS):
        yield from _of_loads(bench, limits)
    yield from beams.ratios(bench)


def _of_loads(bench: DecodeBench, limits: Limits) -> Iterator[tuple[str, float, str]]:
    count, new_tokens = bench.scale.requests, bench.scale.new_tokens
    burst = f"{count} at once"
    ours = bench.rate(burst, OURS)
    flights = {f"{number} at once": number for number in bench.scale.flights}
    yield from _over_instances(bench, limits, {ALONE: 1, **flights, burst: count})
    for system, goal in ((STATIC, "2.5 or more"), (CONTINUOUS, "3 or more")):
        if bench.has(burst, system):
            yield f"{burst}: tokens/s over {system}", ours / bench.rate(burst, system), goal
    yield f"{burst}: tokens/s over ours alone", ours / bench.rate(ALONE, OURS), ""
    yield from _against_runtimes(bench, [ALONE, *flights, burst, *bench.poisson.values()])
    bound = limits.seconds(count, new_tokens)
    yield (
        f"{burst}: share of the bound of {count * new_tokens / bound:.0f} tokens/s",
        ours * bound / (count * new_tokens),
        "0.50 or more",
    )
    for system, what, goal in ((TRITON, "in streams", "0.75 or more"), (UNARY, "in plain requests", "0.90 or more")):
        if bench.has(burst, system):
            yield f"{burst}: tokens/s through Triton {what} over in-process", bench.rate(burst, system) / ours, goal
    if bench.has(burst, TRITON):
        tokens = count * new_tokens / _cell(bench.runs[burst, TRITON])["responses"]
        yield f"{burst}: tokens of a response of a stream", tokens, ""
    yield from _outside(bench, burst)
    for system in (OURS, *RUNTIMES):
        if bench.has(BUSY, system):
            share = bench.rate(BUSY, system) / bench.rate(burst, system)
            yield f"{burst}: tokens/s {BUSY} over undisturbed, {system}", share, "0.45 or more" * (system == OURS)
    for others in dict.fromkeys((8, count)):
        load = f"{others} at once"
        if bench.has(load, OURS):
            slower = bench.mean_ms("latency_ms", load, OURS) / bench.mean_ms("latency_ms", ALONE, OURS)
            allowed = limits.seconds(others, new_tokens) / limits.seconds(1, new_tokens)
            paper = f", the paper's A100 {_PAPER_SLOWER[others]}" if others in _PAPER_SLOWER else ""
            yield f"{load}: time of a request over alone", slower, f"the bound allows {allowed:.2f}{paper}"
    for system in (*RUNTIMES, CONTINUOUS, INSTANCES, STATIC):
        if bench.has(burst, system):
            alike = _alike(bench.runs[burst, OURS], bench.runs[burst, system])
            yield f"{burst}: share of the first {_COMPARED} tokens as of {system}", alike, ""


def _over_instances(bench: DecodeBench, limits: Limits, loads: dict[str, int]) -> Iterator[tuple[str, float, str]]:
    """The paper's headline, for loads of so many requests."""
    for load, count in loads.items():
        if bench.has(load, OURS, INSTANCES):
            theirs = bench.rate(load, INSTANCES)
            most = count * bench.scale.new_tokens / limits.seconds(count, bench.scale.new_tokens) / theirs
            wanted = "15 or more; " if count == bench.scale.requests else ""
            yield (
                f"{load}: tokens/s over {INSTANCES}",
                bench.rate(load, OURS) / theirs,
                f"{wanted}the bound allows {most:.1f}",
            )


def _against_runtimes(bench: DecodeBench, loads: list[str]) -> Iterator[tuple[str, float, str]]:
    for load, system in itertools.product(loads, RUNTIMES):
        if bench.has(load, OURS, system):
            rate = bench.rate(load, OURS) / bench.rate(load, system)
            first = bench.mean_ms("first_token_ms", load, OURS) / bench.mean_ms("first_token_ms", load, system)
            yield f"{load}: tokens/s over {system}", rate, "1.1 or more"
            yield f"{load}: time to first token over {system}'s", first, "1 or less"


def _outside(bench: DecodeBench, load: str) -> Iterator[tuple[str, float, str]]:
    cell = _cell(bench.runs[load, OURS])
    spent = cell["model_ms"] + cell["sampling_ms"] + cell["rest_ms"]
    yield f"{load}: generating thread's time outside the model", 1 - cell["model_ms"] / spent, "0.05 or less"
    yield f"{load}: of it sampling", cell["sampling_ms"] / spent, ""


def _alike(ours: list[Run], others: list[Run]) -> float:
    """Agreement over the rounds in which both systems had the same load."""
    same = [(a.replayed, b.replayed) for a in ours for b in others if a.load is b.load]
    return float(np.mean([agreement(*pair, _COMPARED) for pair in same]))


def _fig5(bench: DecodeBench) -> list[str]:
    """The paper's table: iterations until all requests are answered, over those of one request, and overlap."""
    lines = [
        "Poisson arrivals (Fig. 5): iterations over those of one request, overlap (its inverse), and the speed-up over",
        "concurrent instances; each with the paper's figure",
        f"  {'paper ms':>9}{'iterations':>12}{'of one':>8}{'paper':>7}"
        f"{'overlap':>9}{'span s':>8}{'faster':>8}{'paper':>7}",
    ]
    for paper_ms, load in sorted(bench.poisson.items()):
        if bench.has(load, OURS):
            iterations = _cell(bench.runs[load, OURS])["iterations"]
            of_one, span_s = iterations / bench.scale.new_tokens, bench.runs[load, OURS][0].span_s
            slower = bench.runs[load, INSTANCES][0].span_s / span_s if bench.has(load, INSTANCES) else None
            lines.append(
                f"  {paper_ms:9}{iterations:12.0f}{of_one:8.2f}"
                f"{_stated(PAPER_ITERATIONS.get(paper_ms, 0) / PAPER_NEW, '.2f'):>7}{1 / of_one:9.1%}{span_s:8.1f}"
                f"{_stated(slower, '.1f'):>8}{_stated(PAPER_FASTER.get(paper_ms), '.1f'):>7}"
            )
    return lines


def _stated(value: float | None, form: str) -> str:
    return format(value, form) if value else "-"
