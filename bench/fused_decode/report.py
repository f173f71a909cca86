"""Tables and ratios of `bench.fused_decode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.common.output import Row, table
from bench.fused_decode.bound import Machine, Model, least_seconds
from bench.fused_decode.cells import ALONE, OURS, DecodeBench
from bench.fused_decode.loads import PROMPT, Run, agreement, median

_COMPARED = 16
"""Tokens of each answer that are compared between systems: later ones may follow from ties in rounding."""


@dataclass(frozen=True)
class Limits:
    """The bound of this machine with this model."""

    machine: Machine
    model: Model
    precision: str
    kv_precision: str = "auto"
    prompt: int = PROMPT

    def per_second(self, count: int, new_tokens: int) -> float:
        """The most tokens a second of `count` requests at once."""
        answers = [new_tokens] * count
        least_s = least_seconds(self.machine, self.model, self.precision, self.prompt, answers, self.kv_precision)
        return count * new_tokens / least_s


def cells(bench: DecodeBench) -> list[dict[str, Any]]:
    """Every cell as a plain record of medians over its rounds."""
    return [{"system": system, "load": load, **_cell(runs)} for (load, system), runs in bench.runs.items()]


def _cell(runs: list[Run]) -> dict[str, Any]:
    def p98(name: str) -> float:
        return median([float(np.percentile(getattr(run, name), 98)) for run in runs])

    def mean(name: str) -> float:
        return median([float(getattr(run, name).mean()) for run in runs])

    return {
        "rounds": len(runs),
        "tokens_per_second": median([run.tokens_per_second for run in runs]),
        "first_token_ms": mean("first_token_ms"),
        "first_token_p98_ms": p98("first_token_ms"),
        "between_ms": mean("between_ms"),
        "between_p98_ms": p98("between_ms"),
        "latency_ms": mean("latency_ms"),
        "foreign": median([run.foreign for run in runs]),
        **{name: median([run.replayed.extra[name] for run in runs]) for name in runs[0].replayed.extra},
    }


def tables(bench: DecodeBench, limits: Limits) -> str:
    """All cells, and ours over the others."""
    machine = limits.machine
    shown = [
        f"\nbound: {machine.flops / 1e9:.0f} GFLOP/s of matrix products in {limits.precision}, "
        f"{machine.read / 1e9:.1f} GB/s of reading memory"
    ]
    rows = cells(bench)
    for load in dict.fromkeys(row["load"] for row in rows):
        of_load = [row for row in rows if row["load"] == load]
        shown.append(table(load, [{name: row[name] for name in row if name != "load"} for row in of_load]))
    shown.append(table(f"ours over others, {limits.precision}", ratios(bench, limits)))
    if bench.skipped:
        shown.append("\nnot measured, out of time: " + "; ".join(bench.skipped))
    return "\n".join(shown)


def ratios(bench: DecodeBench, limits: Limits) -> list[Row]:
    """Ours over every other system of each load, and over the bound: tokens/s above 1 is better, first tokens below 1.

    same: the share of the first tokens that both chose.
    """
    rows: list[Row] = []
    for load in dict.fromkeys(load for load, system in bench.runs if system == OURS):
        for system in [name for of, name in bench.runs if of == load and name != OURS]:
            row = {
                "load": load,
                "over": system,
                "tokens/s": bench.rate(load, OURS) / bench.rate(load, system),
                "first token": _mean_ms(bench, "first_token_ms", load, OURS, system),
            }
            same = [
                agreement(ours.replayed, theirs.replayed, _COMPARED)
                for ours in bench.runs[load, OURS]
                for theirs in bench.runs[load, system]
                if ours.load is theirs.load and any(theirs.replayed.tokens)
            ]
            rows.append({**row, "same": float(np.mean(same))} if same else row)
        count = len(bench.runs[load, OURS][0].load.requests)
        if load in (ALONE, f"{count} at once"):
            bound = limits.per_second(count, bench.scale.new_tokens)
            rows.append({"load": load, "over": f"the bound of {bound:.0f}", "tokens/s": bench.rate(load, OURS) / bound})
            if load != ALONE and bench.has(ALONE, OURS):
                slower = bench.mean_ms("latency_ms", load, OURS) / bench.mean_ms("latency_ms", ALONE, OURS)
                alone = bench.rate(load, OURS) / bench.rate(ALONE, OURS)
                rows.append({"load": load, "over": "ours alone", "tokens/s": alone, "a request's time": slower})
    return rows


def _mean_ms(bench: DecodeBench, what: str, load: str, ours: str, theirs: str) -> float:
    return bench.mean_ms(what, load, ours) / bench.mean_ms(what, load, theirs)
