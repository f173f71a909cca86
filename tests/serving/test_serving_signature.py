"""What a technique fixes in a config.pbtxt: completed where it is left out, checked where it is stated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from shapeshift.cascade import front as cascade_front
from shapeshift.cascade import settings as cascade
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode import settings as fused_decode
from shapeshift.fused_decode.request_parser import NUMBERS, RETURNS, RequestParser
from shapeshift.polymorph import settings as polymorph
from shapeshift.serving import model_args
from shapeshift.serving.model_args import Signature
from shapeshift.token_adapt import settings as token_adapt
from tests.fakes import ModelConfig, PbUtils, TritonModelException

SIGNATURES: dict[str, Signature] = {
    "polymorph": polymorph.front_signature({}),
    "token_adapt": token_adapt.signature({}),
    "generate": fused_decode.signature({}),
    "forward": fused_decode.signature({"forward_to": "generate"}),
    "cascade": cascade.signature({}),
}
DESCRIPTION = {"name": "DESCRIPTION", "data_type": "TYPE_STRING", "dims": [1]}
NUM_TOKENS = {"name": "NUM_TOKENS", "data_type": "TYPE_INT32", "dims": [1]}
TOKENS = {"name": "TOKENS", "data_type": "TYPE_STRING", "dims": [1]}
# What a model has whatever outputs its configuration lists.
ALWAYS: dict[str, list[str]] = {
    "polymorph": ["NUM_TOKENS", "TOKENS", "DESCRIPTION"],
    "token_adapt": ["DESCRIPTION"],
    "generate": ["stop_reason", "TOKENS", "DESCRIPTION"],
    "forward": ["stop_reason", "TOKENS", "DESCRIPTION"],
    "cascade": ["NUM_TOKENS", "DESCRIPTION"],
}
TEXT = {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1], "optional": True}


def names(tensors: list[dict[str, Any]]) -> list[str]:
    return [tensor["name"] for tensor in tensors]


@pytest.mark.parametrize("kind", SIGNATURES)
def test_an_empty_configuration_is_completed(kind: str) -> None:
    own = SIGNATURES[kind]
    made = own.complete({"name": "m"})
    assert made["name"] == "m"
    assert names(made["input"]) == [one.name for one in own.inputs if not one.listed]
    assert names(made["output"]) == [one.name for one in own.outputs if not one.listed]
    assert made["max_batch_size"] == (0 if kind in ("generate", "forward") else 64)
    assert made.get("model_transaction_policy") == ({"decoupled": True} if kind == "generate" else None)
    assert made["instance_group"] == [{"kind": "KIND_CPU", "count": 1}]
    assert own.complete(made) == made, "what is complete stays as it is"


def test_what_is_stated_stays() -> None:
    stated = {
        "max_batch_size": 8,
        "input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": ["1"], "label_filename": "x"}],
        "output": [{"name": "LOGITS"}, {"name": "EMBEDDING", "data_type": "TYPE_FP32", "dims": [384]}],
        "instance_group": [{"kind": "KIND_GPU", "gpus": [1]}],
        "parameters": {"a": {"string_value": "b"}},
    }
    before = copy.deepcopy(stated)
    made = SIGNATURES["polymorph"].with_dims({"LOGITS": (3,)}).complete(stated)
    assert stated == before, "the argument is not changed"
    assert made["input"][0] == {**TEXT, "label_filename": "x"}
    assert names(made["input"]) == ["TEXT", "INPUT_IDS", "ATTENTION_MASK"]
    assert made["output"] == [
        {"name": "LOGITS", "data_type": "TYPE_FP32", "dims": [3]},
        {"name": "EMBEDDING", "data_type": "TYPE_FP32", "dims": [384]},
        NUM_TOKENS,
        TOKENS,
        DESCRIPTION,
    ]
    assert {name: made[name] for name in ("max_batch_size", "instance_group", "parameters")} == {
        name: stated[name] for name in ("max_batch_size", "instance_group", "parameters")
    }


def test_an_input_may_be_narrowed_and_an_open_size_is_completed() -> None:
    pixels = {"name": "PIXELS", "data_type": "TYPE_UINT8", "dims": [32, 32, -1]}
    assert SIGNATURES["token_adapt"].complete({"input": [pixels]})["input"][0]["dims"] == [32, 32, 3]
    embedding = {"output": [{"name": "EMBEDDING", "dims": [-1]}]}
    assert SIGNATURES["polymorph"].complete(embedding)["output"][0]["dims"] == [-1]
    known = SIGNATURES["polymorph"].with_dims({"EMBEDDING": (8,)})
    assert known.complete(embedding)["output"][0]["dims"] == [8]


@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_front_can_be_asked_for_its_description_alone(kind: str) -> None:
    first = SIGNATURES[kind].outputs[0].name
    made = SIGNATURES[kind].complete({"output": [{"name": first}]})
    assert names(made["output"]) == [first, *ALWAYS[kind]]
    assert all(one["optional"] for one in made["input"])
    bare = SIGNATURES[kind].complete({"output": [{"name": "DESCRIPTION"}]})["output"]
    assert bare[0] == DESCRIPTION and names(bare[1:]) == ALWAYS[kind][:-1]


def test_the_default_output_of_texts_follows_the_head() -> None:
    completed = polymorph.front_signature({"head": "h"}).complete({})
    assert names(completed["output"]) == ["LOGITS", *ALWAYS["polymorph"]]


def test_pairs_are_part_of_a_cascade_that_classifies_them() -> None:
    assert names(cascade.signature({}, pairs=True).complete({})["input"]) == ["TEXT", "TEXT_PAIR"]
    with pytest.raises(InvalidInputError, match="input: got 'TEXT_PAIR'; one of TEXT$"):
        cascade.signature({}, pairs=False).complete({"input": [{"name": "TEXT_PAIR"}]})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "type": (
        "polymorph",
        {"input": [{**TEXT, "data_type": "TYPE_INT64"}]},
        "input TEXT: got ['TYPE_INT64', 1]; data_type: TYPE_STRING dims: [ 1 ]",
    ),
    "number of dims": ("polymorph", {"input": [{**TEXT, "dims": [1, 1]}]}, "input TEXT: got ['TYPE_STRING', 1, 1]; "),
    "dims": ("token_adapt", {"output": [{"name": "LABEL", "dims": [2]}]}, "output LABEL: got ['TYPE_STRING', 2]; "),
    "a fixed number for what differs between requests": (
        "polymorph",
        {"output": [{"name": "IMPORTANCE", "dims": [8]}]},
        "output IMPORTANCE: got ['TYPE_FP32', 8]; data_type: TYPE_FP32 dims: [ -1 ]",
    ),
    "unknown input": ("cascade", {"input": [{"name": "TXT"}]}, "input: got 'TXT'; one of TEXT, TEXT_PAIR"),
    "unknown output": ("cascade", {"output": [{"name": "SCORE"}]}, "output: got 'SCORE'; one of LABEL, "),
    "no batches": ("polymorph", {"max_batch_size": 0}, "max_batch_size: got 0; 1 or more, or left out for 64"),
    "batches of prompts": ("generate", {"max_batch_size": 8}, "max_batch_size: got 8; 0, or left out: "),
    "one response": (
        "generate",
        {"model_transaction_policy": {}},
        "model_transaction_policy decoupled: got False; true, or left out",
    ),
    "many responses": (
        "cascade",
        {"model_transaction_policy": {"decoupled": True}},
        "model_transaction_policy decoupled: got True; false, or left out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_stated_otherwise_is_refused(case: str) -> None:
    kind, stated, said = REFUSED[case]
    with pytest.raises(InvalidInputError) as raised:
        SIGNATURES[kind].complete(stated)
    assert said in str(raised.value)


def test_signatures_are_those_of_the_fronts() -> None:
    assert [one.name for one in SIGNATURES["cascade"].outputs] == [*cascade_front._OUTPUTS, "DESCRIPTION"]
    inputs = {one.name for one in SIGNATURES["generate"].inputs}
    others = {"text_input", "stream", "sampling_parameters", "exclude_input_in_output", "stop_id"}
    others |= {"input_ids", "input_lengths", "add_special_tokens"}
    assert inputs == others | {*RETURNS} | set(RequestParser(PbUtils(), 2)._checks)
    returned = {output for outputs in (*RETURNS.values(), *NUMBERS.values()) for output in outputs}
    assert {one.name for one in SIGNATURES["generate"].outputs} == {
        *("text_output", "choice_index", "sequence_score", "TOKENS", "DESCRIPTION"),
        *returned,
    }


# At load: Triton's own form of a configuration.


def shown(**stated: Any) -> dict[str, Any]:
    """A configuration as Triton shows it: what is left out has an empty value."""
    return {"name": "m", "max_batch_size": 0, "input": [], "output": [], "parameters": {}, **stated}


def complete(signature: Callable[[Mapping[str, str]], Signature | None], **stated: Any) -> dict[str, Any]:
    config = ModelConfig(shown(**stated))
    assert model_args.auto_complete(PbUtils(), config, signature) is config
    return config.as_dict()


def test_triton_is_given_what_a_configuration_leaves_out() -> None:
    made = complete(fused_decode.signature)
    expected = SIGNATURES["generate"].complete({})
    assert {name: made[name] for name in ("input", "output", "max_batch_size", "model_transaction_policy")} == {
        name: expected[name] for name in ("input", "output", "max_batch_size", "model_transaction_policy")
    }
    forwards = complete(fused_decode.signature, parameters={"forward_to": {"string_value": "generate"}})
    assert "model_transaction_policy" not in forwards
    assert complete(cascade.signature)["max_batch_size"] == 64


def test_triton_keeps_what_a_configuration_states() -> None:
    text = {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1], "optional": False, "format": "FORMAT_NONE"}
    made = complete(polymorph.signature, max_batch_size=8, input=[text])
    assert made["max_batch_size"] == 8 and made["input"][0] == text
    assert names(made["input"]) == ["TEXT", "INPUT_IDS", "ATTENTION_MASK"]


def test_a_tensor_of_which_only_the_name_is_stated_is_completed() -> None:
    bare = {"name": "ENGINE_MS", "data_type": "TYPE_INVALID", "dims": []}
    made = complete(polymorph.signature, output=[bare])
    assert made["output"][0] == {"name": "ENGINE_MS", "data_type": "TYPE_FP32", "dims": [1]}
    assert made["output"][1:] == [NUM_TOKENS, TOKENS, DESCRIPTION]


def test_triton_gets_the_reason_why_a_configuration_is_refused() -> None:
    with pytest.raises(TritonModelException, match="input TEXT: got "):
        complete(polymorph.signature, input=[{**TEXT, "data_type": "TYPE_INT64"}])


def test_a_worker_is_complete_as_it_was_generated() -> None:
    given = shown(parameters={"worker_of": {"string_value": "encode"}}, input=[{"name": "LENGTHS"}])
    assert complete(polymorph.signature, **given) == given
