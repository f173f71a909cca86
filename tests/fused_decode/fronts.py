"""Requests to fronts in this process, with a fake of Triton."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format

from shapeshift.fused_decode import declarations
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.settings import signature
from shapeshift.serving import model_args
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.pb_utils import InferenceResponse
from shapeshift.triton import model_config
from tests.fakes import Request, values_of

MakeFront = Callable[..., GenerateFront]
PROJECT = Path(__file__).resolve().parents[2]
OUTPUTS = tuple(one.name for one in declarations.OUTPUTS)
_TYPES: dict[str, Any] = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
}
_KINDS = {one.name: _TYPES[one.kind] for one in declarations.INPUTS}


def arguments(model: str, **parameters: object) -> ModelArgs:
    """The arguments that Triton passes for a model of the repository, with other parameters."""
    config = model_config.read(PROJECT / "tests" / "model_repository" / model / "config.pbtxt")
    for name, value in parameters.items():
        model_config.set_parameter(config, name, str(value))
    config = model_config.complete(config, signature(model_config.parameters(config)))
    return model_args.read(
        {
            "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
            "model_name": model,
            "model_repository": str(PROJECT / "tests" / "model_repository" / model),
            "model_version": "1",
            "model_instance_name": f"{model}_0",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )


def tensors(given: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs as Triton delivers them."""
    made = {}
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        made[name] = np.array([one.encode() if isinstance(one, str) else one for one in values], _KINDS[name])
    return made


def ask(
    text: str | bytes | None = "abc",
    *,
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
    decoupled: bool = True,
    **given: Any,
) -> Request:
    """A request; by default greedy, with 8 tokens."""
    if text is not None:
        given = {"text_input": text, "max_tokens": 8, "temperature": 0.0, **given}
    chosen = {name: value for name, value in given.items() if value is not None}
    return Request(outputs, parameters, request_id, decoupled, **tensors(chosen))


def text_of(response: InferenceResponse) -> str:
    return str(values_of(response)["text_output"][0].decode())


def answer_of(request: Request) -> dict[str, Any]:
    """The outputs of a request that gets one response."""
    values = {name: value.tolist()[0] for name, value in values_of(request.sender.answer()).items()}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
