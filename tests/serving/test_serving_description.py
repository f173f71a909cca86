"""DESCRIPTION: which requests ask for it, and what they get."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shapeshift import __version__
from shapeshift.serving import description
from shapeshift.serving.description import Description, told
from shapeshift.serving.model_args import ModelArgs
from tests.fakes import Request, text_request

OUTPUTS = ("EMBEDDING", "DESCRIPTION")
NO_INPUT: dict[str, tuple[Request, bool]] = {
    "nothing at all": (Request(OUTPUTS), True),
    "that output alone": (Request(OUTPUTS[1:]), True),
    "that output alone, with a row": (text_request("", outputs=OUTPUTS[1:]), True),
    "a text": (text_request("a", outputs=OUTPUTS), False),
    "nothing, for another output": (Request(OUTPUTS[:1]), False),
}


@pytest.mark.parametrize("case", NO_INPUT)
def test_a_request_without_inputs_or_for_nothing_else_is_meant(case: str) -> None:
    request, wanted = NO_INPUT[case]
    assert description.is_wanted(request) is wanted


def args(max_batch_size: int) -> ModelArgs:
    outputs = [{"name": name} for name in OUTPUTS]
    return ModelArgs("m", Path(), {"max_batch_size": max_batch_size, "output": outputs}, {}, "CPU", 0, "3")


@pytest.mark.parametrize("max_batch_size", [0, 64])
def test_facts_that_do_not_apply_are_left_out(max_batch_size: int) -> None:
    made = Description(description.EMBEDDING, embedding_size=8, pairs=False)
    assert json.loads(made.as_json(args(max_batch_size))) == {
        "kind": "embedding",
        "model": "m",
        "version": "3",
        "outputs": ["EMBEDDING"],
        "max_batch_size": max_batch_size,
        "shapeshift": __version__,
        "embedding_size": 8,
        "pairs": False,
    }


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_what_a_front_says_is_read_from_its_answer(shape: tuple[int, ...]) -> None:
    said = np.array([b'{"kind": "text"}'], np.object_).reshape(shape)
    assert told({"DESCRIPTION": said}) == {"kind": "text"}
    with pytest.raises(KeyError, match="DESCRIPTION"):
        told({"EMBEDDING": said})


@pytest.mark.parametrize("said", [[], [b"{}", b"{}"], [b"{"]])
def test_an_answer_that_is_not_one_text_of_json_is_refused(said: list[bytes]) -> None:
    with pytest.raises(ValueError):
        told({"DESCRIPTION": np.array(said, np.object_)})


def test_the_checkpoint_is_named_as_its_user_named_it() -> None:
    built = {"checkpoint": "../../../checkpoints/a", "checkpoint_name": "a"}
    assert description.checkpoint_name(built) == "a"
    assert description.checkpoint_name({"checkpoint": "b"}) == "b"
    assert description.checkpoint_name({}) is None


def test_a_model_that_forwards_names_itself() -> None:
    whole = json.dumps({"kind": "generation", "model": "g", "stream": "g", "chat_template": "ä"}).encode()
    assert json.loads(description.forwarded(whole, "u")) == {
        "kind": "generation",
        "model": "u",
        "unary": "u",
        "stream": "g",
        "chat_template": "ä",
    }


def test_a_checkpoint_version_is_the_beginning_of_the_hash() -> None:
    assert description.checkpoint_version({"checkpoint_sha256": "0123456789abcdef"}) == "0123456789ab"
    assert description.checkpoint_version({}) is None
    assert description.checkpoint_version({"checkpoint_sha256": ""}) is None


def test_a_version_of_engines_is_the_beginning_of_their_manifests_hash() -> None:
    assert description.engines_version("0123456789abcdef") == "0123456789ab"
    assert description.engines_version("") is None


def test_two_fronts_that_serve_the_same_have_one_registry() -> None:
    first = description.registry_version({"a": "1", "b": "2"})
    assert first == description.registry_version({"b": "2", "a": "1"}) and len(first) == 12
    others: tuple[dict[str, str], ...] = ({"a": "1"}, {"a": "2", "b": "1"}, {"a": "1", "b": "3"}, {})
    assert len({first, *map(description.registry_version, others)}) == 5


def test_facts_that_are_false_or_empty_are_said_and_text_stays_text() -> None:
    made = Description(description.GENERATION, pairs=False, labels=[], load=0.0, chat_template="ä")
    said = made.as_json(args(0))
    assert '"ä"' in said
    found = json.loads(said)
    assert {name: found[name] for name in ("pairs", "labels", "load")} == {
        "pairs": False,
        "labels": [],
        "load": 0.0,
    }
    assert "prompts" not in found


def test_an_empty_name_of_a_checkpoint_is_none() -> None:
    assert description.checkpoint_name({"checkpoint_name": "", "checkpoint": "b"}) == "b"
    assert description.checkpoint_name({"checkpoint": ""}) is None


def test_a_request_for_a_description_is_tried_without_inputs_then_with_each_kind() -> None:
    tried = [{name: values.tolist() for name, values in one.items()} for one in description.PLACEHOLDERS]
    assert tried == [{}, {"TEXT": [[b""]]}, {"IMAGE": [[b""]]}]
