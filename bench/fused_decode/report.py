"""Ratios of `bench.fused_decode`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.common.cells import Cells
from bench.common.output import Row
from bench.fused_decode.bound import Machine, Model, least_seconds
from bench.fused_decode.loads import PROMPT, Answers, agreement

OURS, ALONE = "ours", "alone"
_COMPARED = 16
"""Tokens of each answer that are compared between systems: later ones may follow from ties in rounding."""


@dataclass(frozen=True)
class Limits:
    """The bound of this machine with this model."""

    machine: Machine
    model: Model
    precision: str

    def __str__(self) -> str:
        machine = self.machine
        rates = f"{machine.flops / 1e9:.0f} GFLOP/s of matrix products in {self.precision}"
        return f"bound: {rates}, {machine.read / 1e9:.1f} GB/s of reading memory"

    def per_second(self, count: int, new_tokens: int) -> float:
        """The most tokens a second of `count` requests at once."""
        answers = [new_tokens] * count
        return count * new_tokens / least_seconds(self.machine, self.model, self.precision, PROMPT, answers)


def ratios(cells: Cells[Answers], limits: Limits) -> list[Row]:
    """Ours over every other system of each load, and over the bound: tokens/s above 1 is better, first tokens below 1.

    same: the share of the first tokens that both chose.
    """
    rows: list[Row] = []
    for load in [load for load in cells.loads if OURS in cells.systems(load)]:
        for system in [name for name in cells.systems(load) if name != OURS]:
            row = {
                "load": load,
                "over": system,
                "tokens/s": cells.over(load, OURS, system, "tokens_per_second"),
                "first token": cells.over(load, OURS, system, "first_token_ms"),
            }
            same = [
                agreement(ours.result.replayed, theirs.result.replayed, _COMPARED)
                for ours in cells.runs[load, OURS]
                for theirs in cells.runs[load, system]
                if ours.result.load is theirs.result.load and any(theirs.result.replayed.tokens)
            ]
            rows.append({**row, "same": float(np.mean(same))} if same else row)
        requests = cells.runs[load, OURS][0].result.load.requests
        if load in (ALONE, f"{len(requests)} at once"):
            rate = cells.figure(load, OURS, "tokens_per_second")
            bound = limits.per_second(len(requests), requests[0].new_tokens)
            rows.append({"load": load, "over": f"the bound of {bound:.0f}", "tokens/s": rate / bound})
    return rows
