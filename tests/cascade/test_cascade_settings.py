"""The ranges of a cascade's parameters."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.cascade.settings import CascadeSettings, signature
from shapeshift.errors import InvalidInputError
from tests.limits import Limits, cases, require_limit

LEAST: Limits = {
    "engine_threads": (0, -1),
    "queue_rows": (1, 0),
    "max_queue_ms": (0.0, -0.01),
    "pack_tokens": (0, -1),
    "memory_mb": (1, 0),
    "slo_ms": (0.0, -0.01),
}
MOST: Limits = {
    "engine_threads": (256, 257),
}


def made(**given: Any) -> CascadeSettings:
    return CascadeSettings("candidates", "task", **given)


@pytest.mark.parametrize(("name", "within", "beyond"), cases(LEAST, MOST))
def test_a_parameter_is_taken_to_its_limit_and_not_beyond(name: str, within: float, beyond: float) -> None:
    require_limit(made, name, within, beyond)


@pytest.mark.parametrize("name", ["candidates_dir", "task"])
def test_a_cascade_names_its_candidates_and_its_task(name: str) -> None:
    given: dict[str, Any] = {"candidates_dir": "candidates", "task": "task"} | {name: ""}
    with pytest.raises(InvalidInputError, match=f"^{name}: got ''"):
        CascadeSettings(**given)


@pytest.mark.parametrize("pairs", [None, True, False])
def test_a_request_for_the_description_needs_no_input(pairs: bool | None) -> None:
    inputs = signature({}, pairs).inputs
    assert [one.name for one in inputs] == (["TEXT"] if pairs is False else ["TEXT", "TEXT_PAIR"])
    assert all(one.optional for one in inputs)


def test_the_second_text_is_listed_where_the_configuration_decides() -> None:
    assert [[one.listed for one in signature({}, pairs).inputs] for pairs in (None, True, False)] == [
        [False, True],
        [False, False],
        [False],
    ]


def test_a_cascade_answers_with_all_its_outputs() -> None:
    found = {one.name: (one.data_type, one.dims) for one in signature({}).outputs}
    assert list(found) == [
        *("LABEL", "PROBABILITIES", "CONFIDENCE", "LEVEL", "WORDS_PRUNED", "ENGINE_MS", "CONTROL_MS", "NUM_TOKENS"),
        "DESCRIPTION",
    ]
    assert found["PROBABILITIES"] == ("TYPE_FP32", (None,)) and found["LEVEL"][0] == "TYPE_INT32"
