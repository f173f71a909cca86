from __future__ import annotations

import json
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.serving.parameters import RequestParameters, parse

OWN = ("truncate", "task", "level", "lora_name")


def parsed(**given: Any) -> RequestParameters:
    return parse(json.dumps(given), OWN)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("latency_sm", "; did you mean latency_ms?"),
        ("temprature", "; did you mean temperature?"),
        (
            "lora_name",
            "; lora_name is for models with adapters: those of the backend adapter_cache, such as generate_lora, and "
            "text models of provider native whose config.pbtxt states adapter_mb;",
        ),
        ("zzz", ";"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        parse(json.dumps({name: 0.5}), (), ("text_input", "temperature"))
    assert f"unknown parameter{said} known: latency_ms, " in str(raised.value)


@pytest.mark.parametrize("text", ["", "{}"])
def test_nothing_asked_for(text: str) -> None:
    assert parse(text) == RequestParameters()


def test_every_parameter() -> None:
    assert parsed(
        latency_ms=150, utility=-2, truncate=True, slo_class="gold", request_tag="r1", task="a", level=3, lora_name="b"
    ) == RequestParameters(150.0, -2.0, "a", True, 3, lora_name="b", slo_class="gold", request_tag="r1")


def test_clients_that_know_only_text() -> None:
    made = parsed(latency_ms="1e3", utility="0", truncate="false", level="2")
    assert made == RequestParameters(latency_ms=1000.0, utility=0.0, truncate=False, level=2)
    assert parsed(truncate="true").truncate is True


@pytest.mark.parametrize(
    "name",
    ["triton_enable_empty_final_response", "sequence_id", "binary_data_output", "priority", "timeout", "headers"],
)
def test_what_is_tritons_own_passes_by(name: str) -> None:
    assert parsed(**{name: 1}) == RequestParameters()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"latency_ms": 0}, "parameter latency_ms: got 0; above 0"),
        ({"latency_ms": -1.5}, "parameter latency_ms: got -1.5; above 0"),
        ({"latency_ms": "soon"}, "parameter latency_ms: got 'soon'; a finite number"),
        ({"latency_ms": "nan"}, "parameter latency_ms: got 'nan'; a finite number"),
        ({"latency_ms": "inf"}, "parameter latency_ms: got 'inf'; a finite number"),
        ({"latency_ms": True}, "parameter latency_ms: got True; a finite number"),
        ({"latency_ms": None}, "parameter latency_ms: got None; a finite number"),
        ({"latency_ms": [1]}, "parameter latency_ms: got [1]; a finite number"),
        ({"latency_ms": ""}, "parameter latency_ms: got ''; a finite number"),
        ({"latency_ms": 10**400}, "parameter latency_ms: got 1000"),
        ({"utility": "1e999"}, "parameter utility: got '1e999'; a finite number"),
        ({"truncate": 1}, "parameter truncate: got 1; true or false"),
        ({"truncate": "True"}, "parameter truncate: got 'True'; true or false"),
        ({"level": -1}, "parameter level: got -1; a whole number, 0 or more"),
        ({"level": 1.5}, "parameter level: got 1.5; a whole number, 0 or more"),
        ({"task": ""}, "parameter task: got ''; a text of 1 to 256 characters"),
        ({"task": 5}, "parameter task: got 5; a text of 1 to 256 characters"),
        ({"slo_class": "x" * 257}, "parameter slo_class: got 'xxx"),
        (
            {"latency": 3},
            "parameter latency: got 3; unknown parameter; did you mean latency_ms? known: latency_ms, lev",
        ),
        ({"": 3}, "parameter : got 3; unknown parameter"),
        ({"Timeout": 3}, "parameter Timeout: got 3; unknown parameter"),
    ],
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parsed(**given)
    assert str(caught.value).startswith(said)


def test_what_another_front_understands_is_unknown_here() -> None:
    with pytest.raises(InvalidInputError, match="parameter task: .*known: latency_ms, request_tag, slo_class, utility"):
        parse('{"task": "a"}')
    with pytest.raises(InvalidInputError, match="parameter truncate"):
        parse('{"truncate": true}')
