"""The messages of one inference over gRPC: arrays as raw bytes in a request, and out of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from shapeshift.errors import InvalidInputError

Tensors = dict[str, NDArray[Any]]

_BYTES = "BYTES"
_INT64 = 1 << 63
# Names that the server would take for its own, and not give to a model.
_RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
_RESERVED_PREFIX = "triton_"


def request_message(
    model: str,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    request_id: str = "",
    version: int | None = None,
) -> Any:
    """A ModelInferRequest. outputs: the requested ones, all where empty; version: None for the model's highest.

    Raises InvalidInputError for a parameter or a type of values that the protocol has no place for.
    """
    request = messages.ModelInferRequest(model_name=model, id=request_id)
    if version is not None:
        request.model_version = str(version)
    for name, values in inputs.items():
        request.inputs.add(name=name, datatype=_datatype(values.dtype, name), shape=values.shape)
        request.raw_input_contents.append(_raw(values))
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        setattr(request.parameters[name], *_parameter(name, value))
    return request


def tensors_of(response: Any) -> Tensors:
    """The outputs of a ModelInferResponse by name, not to be written to."""
    return {
        output.name: _array(output.datatype, raw).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def is_last(response: Any) -> bool:
    """Whether the model has said that this ModelInferResponse is the last one of its stream."""
    return bool(response.parameters["triton_final_response"].bool_param)


def _parameter(name: str, value: Any) -> tuple[str, bool | int | float | str]:
    """The field of the protocol for `value`, and the value; refused before gRPC, which tells a stream no reason."""
    if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
        raise InvalidInputError(f"parameter {name}", value, "a name that is not Triton's own")
    if isinstance(value, bool):
        return "bool_param", value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return "int64_param", value
    if isinstance(value, float):
        return "double_param", value
    if isinstance(value, str):
        return "string_param", value
    raise InvalidInputError(f"parameter {name}", value, "a text, a number, or true or false; of at most 64 bits")


@cache
def _datatype(dtype: np.dtype[Any], name: str) -> str:
    datatype: str | None = np_to_triton_dtype(dtype)
    if datatype is None:
        raise InvalidInputError(name, str(dtype), "numbers, true or false, or bytes")
    return datatype


@cache
def _dtype(datatype: str) -> np.dtype[Any]:
    return np.dtype(triton_to_np_dtype(datatype))


def _raw(values: NDArray[Any]) -> bytes:
    if values.dtype != np.object_ and values.dtype.type is not np.bytes_:
        return values.tobytes()
    return bytes(serialize_byte_tensor(values).item()) if values.size else b""


def _array(datatype: str, raw: bytes) -> NDArray[Any]:
    if datatype == _BYTES:
        return np.asarray(deserialize_bytes_tensor(raw))
    return np.frombuffer(raw, _dtype(datatype))
