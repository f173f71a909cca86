"""`shapeshift policy token_adapt.*`: results, and errors that name the key."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.cli.policy import evaluate
from shapeshift.errors import InvalidInputError

BATCH = {"requests": [[0, 100, 1], [5, 100, 1], [30, 100, 1]], "delta": 10, "epsilon": 4, "eta": 50, "mu": 0.5}
PLAN = {"now": 10, "deadlines": [30, 40], "times": [[5, 15], [5, 15]], "utilities": [[3, 4], [3, 4]]}
BY_RATE = {
    "now": 0,
    "rate": 300,
    "table": [[0, 8], [280, 4], [380, -5]],
    "gammas": [-5, 4, 8],
    "deadlines": [100, 100],
    "times": [[10, 20, 30]] * 2,
    "mean_utilities": [0.5, 0.9],
    "kappa": 0.8,
}


def test_batches() -> None:
    assert evaluate("token_adapt.batch", BATCH) == {"batches": [[0, 1], [2]]}
    assert evaluate("token_adapt.batch", {**BATCH, "requests": []}) == {"batches": []}
    assert evaluate("token_adapt.batch", {**BATCH, "epsilon": 1}) == {"batches": [[0], [1], [2]]}


@pytest.mark.parametrize("algorithm", ["grid", "front", "paper", "paper_printed"])
def test_plans(algorithm: str) -> None:
    found = evaluate("token_adapt.plan", {**PLAN, "algorithm": algorithm})
    assert found["plan"] in ([1, 0], [0, 1])
    assert (found["utility"], found["algorithm"]) == (7.0, algorithm)


def test_plans_default_to_the_grid_and_keep_to_memory() -> None:
    assert evaluate("token_adapt.plan", PLAN)["algorithm"] == "grid"
    held = {**PLAN, "memory": [[1, 2], [1, 2]], "memory_limit": 2, "tick_ms": 0.5}
    assert evaluate("token_adapt.plan", held) == {"plan": [0, 0], "utility": 6.0, "algorithm": "grid"}
    none = {"now": 0, "deadlines": [], "times": [], "utilities": []}
    assert evaluate("token_adapt.plan", none) == {"plan": [], "utility": 0.0, "algorithm": "grid"}
    assert evaluate("token_adapt.plan", {**PLAN, "now": 50})["plan"] == [-1, -1]
    assert evaluate("token_adapt.plan", {**PLAN, "memory": None, "memory_limit": None})["utility"] == 7.0


def test_gammas_by_rate() -> None:
    assert evaluate("token_adapt.by_rate", BY_RATE) == {"plan": [1, 2]}
    assert evaluate("token_adapt.by_rate", {**BY_RATE, "rate": 500}) == {"plan": [0, 2]}
    assert evaluate("token_adapt.by_rate", {**BY_RATE, "deadlines": [5, 5]}) == {"plan": [0, 0]}
    assert evaluate("token_adapt.by_rate", {**BY_RATE, "table": [[400, 4]]}) == {"plan": [1, 2]}


def test_lists_of_inputs() -> None:
    assert evaluate("token_adapt.by_rate", [BY_RATE, BY_RATE]) == [{"plan": [1, 2]}] * 2


@pytest.mark.parametrize(
    ("name", "given", "changed", "named"),
    [
        ("batch", BATCH, {"requests": [[5, 100, 1], [0, 100, 1]]}, "requests"),
        ("batch", BATCH, {"requests": [[0, 100]]}, r"requests\[0\]"),
        ("batch", BATCH, {"requests": [[0, 0, 1]]}, r"requests\[0\]\[1\]"),
        ("batch", BATCH, {"requests": [[0, 1, -1]]}, r"requests\[0\]\[2\]"),
        ("batch", BATCH, {"requests": [[0, 1, float("nan")]]}, r"requests\[0\]\[2\]"),
        ("batch", BATCH, {"epsilon": 0}, "epsilon"),
        ("batch", BATCH, {"epsilon": 2.5}, "epsilon"),
        ("batch", BATCH, {"delta": -1}, "delta"),
        ("batch", BATCH, {"eta": True}, "eta"),
        ("batch", BATCH, {"mu": None}, "mu"),
        ("batch", BATCH, {"gamma": 1}, "gamma"),
        ("plan", PLAN, {"deadlines": [40, 30]}, "deadlines"),
        ("plan", PLAN, {"deadlines": [30]}, "times"),
        ("plan", PLAN, {"times": [[5, 15], [5]]}, r"times\[1\]"),
        ("plan", PLAN, {"times": [[5, 15], [5, -1]]}, r"times\[1\]\[1\]"),
        ("plan", PLAN, {"times": [[], []]}, r"times\[0\]"),
        ("plan", PLAN, {"utilities": [[3, 4]]}, "utilities"),
        ("plan", PLAN, {"utilities": [[3], [3]]}, r"utilities\[0\]"),
        ("plan", PLAN, {"utilities": [[3, -4], [3, 4]]}, r"utilities\[0\]\[1\]"),
        ("plan", PLAN, {"memory": [[1, 2], [1, 2]]}, "memory_limit"),
        ("plan", PLAN, {"memory_limit": 4}, "memory"),
        ("plan", PLAN, {"memory": [[1, 2]], "memory_limit": 4}, "memory"),
        ("plan", PLAN, {"tick_ms": 0}, "tick_ms"),
        ("plan", PLAN, {"now": float("inf")}, "now"),
        ("plan", PLAN, {"algorithm": "greedy"}, "algorithm"),
        ("by_rate", BY_RATE, {"table": []}, "table"),
        ("by_rate", BY_RATE, {"table": [[0, 3]]}, r"table\[0\]"),
        ("by_rate", BY_RATE, {"table": [[5, 4], [1, 8]]}, "table"),
        ("by_rate", BY_RATE, {"table": [[0]]}, r"table\[0\]"),
        ("by_rate", BY_RATE, {"gammas": [-5, 4, 4]}, "gammas"),
        ("by_rate", BY_RATE, {"rate": -1}, "rate"),
        ("by_rate", BY_RATE, {"mean_utilities": [0.5]}, "mean_utilities"),
        ("by_rate", BY_RATE, {"times": [[10, 20]] * 2}, r"times\[0\]"),
        ("by_rate", BY_RATE, {"deadlines": [9, 5]}, "deadlines"),
    ],
)
def test_errors_name_the_invalid_key(name: str, given: dict[str, Any], changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        evaluate(f"token_adapt.{name}", {**given, **changed})


@pytest.mark.parametrize(("name", "given"), [("batch", BATCH), ("plan", PLAN), ("by_rate", BY_RATE)])
def test_every_key_without_a_default_is_required(name: str, given: dict[str, Any]) -> None:
    for key in given:
        with pytest.raises(InvalidInputError, match=key):
            evaluate(f"token_adapt.{name}", {other: value for other, value in given.items() if other != key})
