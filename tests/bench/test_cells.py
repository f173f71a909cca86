"""The runner of systems in turns, and the options that benchmarks share."""

from __future__ import annotations

import pytest

from bench.common.cells import Cells, Run
from bench.common.output import parser
from shapeshift.errors import InvalidInputError


def figures(run: Run[float]) -> dict[str, float]:
    return {"ms": run.result}


def test_every_system_runs_once_a_round_in_random_order() -> None:
    order: list[str] = []

    def system(name: str) -> float:
        order.append(name)
        return 1.0

    cells = Cells(figures, seed=1)
    cells.measure("load", {name: lambda name=name: system(name) for name in "abcd"}, rounds=5)  # type: ignore[misc]
    rounds = ["".join(order[first : first + 4]) for first in range(0, 20, 4)]
    assert {"".join(sorted(one)) for one in rounds} == {"abcd"} and len(set(rounds)) > 1
    assert cells.loads == ["load"] and sorted(cells.systems("load")) == [*"abcd"]


def test_figures_are_medians_over_the_rounds() -> None:
    cells = Cells(figures)
    for ours, theirs in ((1.0, 3.0), (9.0, 6.0), (2.0, 4.0)):
        cells.keep("load", "ours", Run(ours, foreign=0.5, own_s=1.0))
        cells.keep("load", "theirs", Run(theirs, foreign=0.0, own_s=1.0))
    assert cells.figure("load", "ours", "ms") == 2.0 and cells.over("load", "ours", "theirs", "ms") == 0.5
    first, _ = cells.records()
    assert first == {"system": "ours", "load": "load", "rounds": 3, "ms": 2.0, "foreign": 0.5}
    assert "ours         3   2" in cells.tables()


def test_no_run_begins_after_the_budget() -> None:
    cells = Cells(figures, budget_s=0.0)
    cells.measure("2 at once", {"ours": lambda: 1.0})
    assert cells.runs == {} and "not measured, out of time: 2 at once: ours" in cells.tables()


def test_parts_are_a_list_with_commas() -> None:
    options = parser("x", "What it measures.\n\nMore.", "a minute", ("a", "b", "c"), usual=2)
    assert options.parse_args([]).parts == ["a", "b"]
    assert options.parse_args(["--quick", "--parts", "c,a"]).parts == ["c", "a"]
    with pytest.raises(InvalidInputError, match="--parts: got 'd'; some of a, b, c"):
        options.parse_args(["--parts", "a,d"])
