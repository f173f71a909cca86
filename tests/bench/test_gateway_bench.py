"""What the bench of the gateway says of its measurements."""

from __future__ import annotations

import numpy as np

from bench.common.systems import Outcome
from bench.common.text_bench import TextBench, TextScale
from bench.gateway.infinity import ratios


def test_each_api_is_held_against_the_better_engine_of_infinity() -> None:
    bench = TextBench(TextScale(1, 4, 0.0, (8, 32), (), ()), seed=0)
    for clients in (8, 32):
        for name, rate, spent_ms in (("ours", 50.0, 8.0), ("torch", 40.0, 10.0), ("slow", 5.0, 90.0)):
            bench.outcomes["short", f"closed {clients}", name] = [Outcome(np.full(4, 1.0), rate)]
            bench.own_ms["short", f"closed {clients}", name] = [spent_ms * 9, spent_ms, spent_ms]
    rows = ratios(bench, ["ours"], ["torch", "slow"])
    assert [row["load"] for row in rows] == ["closed 8", "closed 32"]
    assert all(row["texts/s"] == row["processor time"] == 1.25 for row in rows)
