"""Cells, tables and ratios of the decode benchmark, over fake systems."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.common.cells import Cells
from bench.fused_decode import report
from bench.fused_decode.__main__ import CONTINUOUS, GENAI, LLAMA_CPP, OURS, STATIC, TRITON, UNARY, Scale, run
from bench.fused_decode.loads import Answers, Load, LoadGenerator, figures
from bench.peers.protocol import Replayed

STEPS = {OURS: 0.01, TRITON: 0.0125, UNARY: 0.01, GENAI: 0.02, STATIC: 0.03, CONTINUOUS: 0.04, LLAMA_CPP: 0.015}
SCALE = Scale(tuple(STEPS), requests=8, new_tokens=4, rounds=2, budget_s=100.0, flights=(2,), poisson=(50,))


def system(name: str, step_s: float) -> Callable[[Load], Answers]:
    """Gives each request a token every `step_s`, the first after twice that."""

    def replay(load: Load) -> Answers:
        stamps = [[one.at_s + step_s * (2 + at) for at in range(one.new_tokens)] for one in load.requests]
        tokens = [[1 + (name == STATIC)] * one.new_tokens for one in load.requests]
        return Answers(load, Replayed(stamps, tokens, {"iterations": 8.0} if name == OURS else {}))

    return replay


def measured(scale: Scale) -> Cells[Answers]:
    cells = Cells(figures, budget_s=scale.budget_s)
    loads = LoadGenerator(0, range(10), scale.new_tokens)
    run(cells, loads, scale, {name: system(name, step_s) for name, step_s in STEPS.items()})
    return cells


@pytest.fixture(scope="module")
def cells() -> Cells[Answers]:
    return measured(SCALE)


def test_all_cells_of_a_load_have_the_same_requests(cells: Cells[Answers]) -> None:
    loads = {cells.runs["8 at once", name][0].result.load.name for name in STEPS}
    assert loads == {"8 at once"}
    assert len({id(cells.runs["8 at once", name][0].result.load) for name in STEPS}) == 1
    assert len(cells.runs["8 at once", OURS]) == 2


def test_ours_over_every_other_system(cells: Cells[Answers]) -> None:
    rows = {(row["load"], row["over"]): row for row in report.ratios(cells)}
    burst = "8 at once"
    for name, faster in {STATIC: 3.0, GENAI: 2.0, LLAMA_CPP: 1.5, TRITON: 1.25, UNARY: 1.0}.items():
        assert rows[burst, name]["tokens/s"] == pytest.approx(faster)
        assert rows[burst, name]["first token"] == pytest.approx(1 / faster)
    assert rows["alone", GENAI]["tokens/s"] == pytest.approx(2.0)
    assert rows[burst, GENAI]["same"] == 1.0 and rows[burst, STATIC]["same"] == 0.0


def test_tables_name_every_system(cells: Cells[Answers]) -> None:
    text = cells.tables()
    assert all(f"\n  {name} " in text for name in STEPS)
    assert "out of time" not in text
