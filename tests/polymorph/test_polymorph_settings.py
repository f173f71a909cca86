"""The ranges of the parameters of a front and of its workers, and the tensors of both."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.settings import (
    MAX_WORKERS,
    PlacementSettings,
    PolymorphSettings,
    WorkerSettings,
    front_signature,
    signature,
    worker_name,
    worker_signature,
)
from shapeshift.serving.model_args import Tensor
from tests.limits import Limits, cases, require_limit

LEAST: Limits = {
    "engine_threads": (0, -1),
    "queue_rows": (1, 0),
    "max_queue_ms": (0.0, -0.01),
    "pack_tokens": (0, -1),
    "slo_ms": (0.0, -0.01),
    "memory_mb": (1, 0),
    "workers": (0, -1),
    "min_workers": (0, -1),
    "max_workers": (0, -1),
}
MOST: Limits = {
    "engine_threads": (256, 257),
    "workers": (MAX_WORKERS, MAX_WORKERS + 1),
    "min_workers": (MAX_WORKERS, MAX_WORKERS + 1),
    "max_workers": (MAX_WORKERS, MAX_WORKERS + 1),
}


@pytest.mark.parametrize(("name", "within", "beyond"), cases(LEAST, MOST))
def test_a_parameter_is_taken_to_its_limit_and_not_beyond(name: str, within: float, beyond: float) -> None:
    require_limit(PolymorphSettings, name, within, beyond)


@pytest.mark.parametrize("name", ["placement", "curve", "dispatch", "allocation"], ids=lambda name: name)
def test_other_words_are_refused(name: str) -> None:
    given: dict[str, Any] = {name: "other"}
    with pytest.raises(InvalidInputError, match=f"^{name}: got 'other'"):
        PolymorphSettings(**given)


TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"workers": 3, "min_workers": 3}, ""),
    ({"workers": 3, "min_workers": 4}, "min_workers: got 4; 0 to 3"),
    ({"workers": 3, "min_workers": 4, "max_workers": 5}, ""),
    ({"workers": 3, "min_workers": 6, "max_workers": 5}, "min_workers: got 6; 0 to 5"),
    ({"workers": 3, "max_workers": 3}, ""),
    ({"workers": 3, "max_workers": 2}, r"max_workers: got 2; 0, or at least workers \(3\)"),
    ({"placement": "partitioned", "slo_ms": 0.01}, ""),
    ({"placement": "partitioned", "slo_ms": 0.0}, "slo_ms: got 0.0; above 0 with placement partitioned"),
]


@pytest.mark.parametrize(("given", "refusal"), TOGETHER, ids=lambda one: str(one)[:60])
def test_numbers_of_workers_agree(given: dict[str, Any], refusal: str) -> None:
    if not refusal:
        made = PolymorphSettings(**given)
        assert {name: getattr(made, name) for name in given} == given
        return
    with pytest.raises(InvalidInputError, match=f"^{refusal}"):
        PolymorphSettings(**given)


@pytest.mark.parametrize(("text", "edges"), [("[]", []), ("[1]", [1]), ("[16, 17]", [16, 17])])
def test_edges_ascend_from_at_least_1(text: str, edges: list[int]) -> None:
    assert PlacementSettings(bin_edges=text).edges() == edges


@pytest.mark.parametrize("text", ["[0]", "[2, 2]", "[3, 2]", "[1.5]", "{", "7", '["a"]'])
def test_other_edges_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="^bin_edges: got "):
        PlacementSettings(bin_edges=text).edges()


def test_a_bin_is_a_length_or_any() -> None:
    require_limit(WorkerSettings, "bin", 0, -1)


def test_a_front_lists_what_its_configuration_chooses() -> None:
    for parameters, default in (({}, "EMBEDDING"), ({"head": "a.safetensors"}, "LOGITS")):
        found = front_signature(parameters)
        assert [one.name for one in found.outputs if not one.listed] == [
            *(default, "NUM_TOKENS", "TOKENS", "DESCRIPTION")
        ]
        assert [one.name for one in found.outputs if one.listed] == [
            *({"EMBEDDING", "LOGITS"} - {default}),
            *("TOKEN_LOGITS", "IMPORTANCE", "TOKEN_EMBEDDING", "TOKEN_WEIGHTS", "TERM_WEIGHTS"),
            *("SPARSE_INDICES", "SPARSE_VALUES", "ENTITIES", "OFFSETS", "ENGINE_MS"),
        ]
        shapes = {one.name: one.dims for one in found.outputs}
        assert (shapes["TOKEN_LOGITS"], shapes["IMPORTANCE"], shapes["OFFSETS"]) == ((-1, None), (-1,), (-1, 2))


def test_a_worker_answers_with_the_outputs_of_its_engines_and_its_report() -> None:
    own = Tensor("EMBEDDING", "TYPE_FP32", (-1, 4))
    found = worker_signature([own])
    assert [one.name for one in found.inputs] == ["INPUT_IDS", "LENGTHS"]
    assert [one.name for one in found.outputs] == ["EMBEDDING", "STATE"] and found.max_batch_size == 0
    assert signature({"worker_of": "front"}) is None and signature({}) == front_signature({})


@pytest.mark.parametrize(("number", "name"), [(0, "a_w00"), (7, "a_w07"), (123, "a_w123")])
def test_workers_are_numbered_with_two_digits_and_more(number: int, name: str) -> None:
    assert worker_name("a", number) == name
