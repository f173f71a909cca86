"""What the bench of the gateway says of its measurements."""

from __future__ import annotations

import numpy as np
import pytest

from bench.common.cells import Cells, Run
from bench.common.texts import Outcome, figures
from bench.gateway.__main__ import ratios


def test_each_api_is_held_against_the_better_engine_of_infinity() -> None:
    cells = Cells(figures)
    for clients in (8, 32):
        for name, rate, spent_ms in (("ours", 50.0, 8.0), ("torch", 40.0, 10.0), ("slow", 5.0, 90.0)):
            outcome = Outcome(np.full(4, 1.0), rate)
            runs = [Run(outcome, 0.0, 4 * ms / 1e3) for ms in (spent_ms * 9, spent_ms, spent_ms)]
            cells.runs[f"closed {clients}", name] = runs
    rows = ratios(cells, ["ours"], ["torch", "slow"])
    assert [row["load"] for row in rows] == ["closed 8", "closed 32"]
    assert all(row["texts/s"] == row["processor time"] == pytest.approx(1.25) for row in rows)
