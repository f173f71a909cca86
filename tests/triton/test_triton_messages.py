"""The messages of an inference: what tritonclient's own classes would send, and what a model has sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferInput
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import np_to_triton_dtype

from shapeshift.errors import InvalidInputError
from shapeshift.serving.error_codes import FORWARDED
from shapeshift.triton.async_client import ModelCall, is_last, message_of, tensors_of

VALUES = [
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
    np.array([True, False]),
    np.zeros((0, 4), np.float16),
    np.array([[b"one"], ["zw\u00f6lf"], [b""]], dtype=object),
    np.array([b"a\x00b", b"c"]),
    np.zeros((0, 1), dtype=object),
]


def message(inputs: dict[str, Any], **fields: Any) -> Any:
    return message_of(ModelCall("m", inputs, 1.0, **fields))


def response(values: Any) -> Any:
    """A response with the output OUT, from the bytes that tritonclient would send for `values`."""
    sent = InferInput("OUT", list(values.shape), np_to_triton_dtype(values.dtype))
    sent.set_data_from_numpy(values)
    answer = messages.ModelInferResponse(raw_output_contents=[sent._get_content()])
    answer.outputs.add(name="OUT", datatype=sent.datatype(), shape=sent.shape())
    return answer


@pytest.mark.parametrize("values", VALUES, ids=lambda one: f"{one.dtype}{one.shape}")
def test_values_travel_as_those_of_tritonclient(values: Any) -> None:
    request = message({"IN": values}, outputs=["OUT"], request_id="7")
    assert (request.model_name, request.id, [one.name for one in request.outputs]) == ("m", "7", ["OUT"])
    sent, expected = request.inputs[0], response(values)
    assert (sent.name, sent.datatype, list(sent.shape)) == ("IN", expected.outputs[0].datatype, list(values.shape))
    assert list(request.raw_input_contents) == list(expected.raw_output_contents)
    answer = tensors_of(expected)["OUT"]
    assert answer.shape == values.shape and answer.dtype == (object if values.dtype.kind == "S" else values.dtype)
    encoded = [one.encode() if isinstance(one, str) else one for one in values.ravel().tolist()]
    assert answer.ravel().tolist() == encoded


def test_parameters_keep_their_types() -> None:
    given = {"text": "a", "flag": True, "count": -(2**63), "share": 0.5}
    request = message({}, parameters=given)
    assert {name: value.WhichOneof("parameter_choice") for name, value in request.parameters.items()} == {
        "text": "string_param",
        "flag": "bool_param",
        "count": "int64_param",
        "share": "double_param",
        FORWARDED: "bool_param",
    }
    assert request.parameters["count"].int64_param == -(2**63)


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1])
def test_the_outermost_numbers_of_64_bits_are_sent(value: int) -> None:
    assert message({}, parameters={"n": value}).parameters["n"].int64_param == value


@pytest.mark.parametrize("value", [-(2**63) - 1, 2**63, None, [1]])
def test_a_value_without_a_place_in_the_protocol_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^parameter n: got .*; of at most 64 bits$"):
        message({}, parameters={"n": value})


def test_a_request_without_outputs_and_parameters_states_none() -> None:
    request = message({})
    assert (len(request.outputs), [*request.parameters], len(request.inputs), request.id) == (0, [FORWARDED], 0, "")


def test_outputs_and_inputs_keep_their_order() -> None:
    values = np.zeros(1, np.int32)
    request = message({"B": values, "A": values + 1}, outputs=["D", "C"])
    assert [one.name for one in request.inputs] == ["B", "A"]
    assert [np.frombuffer(raw, np.int32)[0] for raw in request.raw_input_contents] == [0, 1]
    assert [one.name for one in request.outputs] == ["D", "C"]


@pytest.mark.parametrize("said", [None, False, True])
def test_a_response_is_the_last_where_the_model_says_so(said: bool | None) -> None:
    made = messages.ModelInferResponse()
    if said is not None:
        made.parameters["triton_final_response"].bool_param = said
    assert is_last(made) is bool(said)


def test_no_texts_are_no_bytes() -> None:
    request = message({"TEXT": np.zeros((0, 1), object)})
    assert list(request.raw_input_contents) == [b""] and list(request.inputs[0].shape) == [0, 1]


@pytest.mark.parametrize("name", ["timeout", "priority", "triton_enable_empty_final_response"])
def test_names_of_the_server_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"parameter {name}: got "):
        message({}, parameters={name: 1})


def test_values_without_a_type_in_the_protocol_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="WHEN: got 'datetime64"):
        message({"WHEN": np.array(["2026-01-01"], "datetime64[D]")})
