"""Ratios of `bench.fused_decode`."""

from __future__ import annotations

import numpy as np

from bench.common.cells import Cells
from bench.common.output import Row
from bench.fused_decode.loads import Answers, agreement

OURS, ALONE = "ours", "alone"
_COMPARED = 16
"""Tokens of each answer that are compared between systems: later ones may follow from ties in rounding."""


def ratios(cells: Cells[Answers]) -> list[Row]:
    """Ours over every other system of each load: tokens/s above 1 is better, first tokens below 1.

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
    return rows
