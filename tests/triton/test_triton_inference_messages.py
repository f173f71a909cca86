"""The messages of an inference: what tritonclient's own classes would send and read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferInput, InferResult
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import np_to_triton_dtype

from shapeshift.errors import InvalidInputError
from shapeshift.triton.inference_messages import request_message, tensors_of

VALUES = [
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
    np.array([True, False]),
    np.zeros((0, 4), np.float16),
    np.array([[b"one"], ["zw\u00f6lf"], [b""]], dtype=object),
    np.array([b"a\x00b", b"c"]),
    np.zeros((0, 1), dtype=object),
]


def response(values: Any) -> Any:
    """A response with the output OUT, from the bytes that tritonclient would send for `values`."""
    own = InferInput("OUT", list(values.shape), np_to_triton_dtype(values.dtype))
    own.set_data_from_numpy(values)
    made = messages.ModelInferResponse(raw_output_contents=[own._get_content()])
    made.outputs.add(name="OUT", datatype=own.datatype(), shape=own.shape())
    return made


@pytest.mark.parametrize("values", VALUES, ids=lambda one: f"{one.dtype}{one.shape}")
def test_values_travel_as_those_of_tritonclient(values: Any) -> None:
    request = request_message("m", {"IN": values}, ["OUT"], request_id="7")
    assert (request.model_name, request.id, [one.name for one in request.outputs]) == ("m", "7", ["OUT"])
    sent, expected = request.inputs[0], response(values)
    assert (sent.name, sent.datatype, list(sent.shape)) == ("IN", expected.outputs[0].datatype, list(values.shape))
    assert list(request.raw_input_contents) == list(expected.raw_output_contents)
    found, known = tensors_of(expected)["OUT"], InferResult(expected).as_numpy("OUT")
    assert found.shape == known.shape and found.dtype == known.dtype
    assert found.tolist() == known.tolist()


def test_parameters_keep_their_types() -> None:
    given = {"text": "a", "flag": True, "count": -(2**63), "share": 0.5}
    request = request_message("m", {}, parameters=given)
    assert {name: value.WhichOneof("parameter_choice") for name, value in request.parameters.items()} == {
        "text": "string_param",
        "flag": "bool_param",
        "count": "int64_param",
        "share": "double_param",
    }
    assert request.parameters["count"].int64_param == -(2**63)


@pytest.mark.parametrize("name", ["timeout", "priority", "triton_enable_empty_final_response"])
def test_names_of_the_server_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"parameter {name}: got "):
        request_message("m", {}, parameters={name: 1})


def test_values_without_a_type_in_the_protocol_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="WHEN: got 'datetime64"):
        request_message("m", {"WHEN": np.array(["2026-01-01"], "datetime64[D]")})
