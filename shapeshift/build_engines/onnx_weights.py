"""The weights in an ONNX file, under the names that they had before the export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError, UnsupportedError

Tensor = NDArray[Any]

# What torch's exporter calls a tensor that it computed itself, such as a transposed weight.
_RENAMED = "onnx::"
_BIAS, _WEIGHT = ".bias", ".weight"


def initializers(path: Path, model: Any = None) -> dict[str, Tensor]:
    """The tensors of an ONNX file by name, as they are stored. Files of external data must lie beside it.

    model: the file's ModelProto, where it has been read; None: it is read here.

    An exporter transposes and renames the weight of a linear layer (onnx::MatMul_123). It comes back as torch has it,
    [outputs, inputs], under the name of its layer: that of the bias which is added to the product, or else that of the
    scope. Equal tensors, which an exporter stores once, come back under each of their names.
    Raises UnsupportedError without the package onnx, InvalidInputError for a file that is not whole.
    """
    try:
        import onnx
    except ImportError as error:
        raise UnsupportedError(f"{path}: reading ONNX needs the package onnx ({error})") from None
    try:
        graph = (onnx.load(str(path)) if model is None else model).graph
        tensors: dict[str, Tensor] = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    except Exception as error:  # noqa: BLE001  protobuf and the library raise many types
        raise InvalidInputError("checkpoint", str(path), f"a whole ONNX file ({error})") from None
    tensors |= {
        node.output[0]: tensors[node.input[0]]
        for node in graph.node
        if node.op_type == "Identity" and node.input[0] in tensors
    }
    biases = _biases(graph, tensors)
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in tensors and node.input[1].startswith(_RENAMED):
            bias = node.input[2] if len(node.input) > 2 else biases.get(node.output[0], "")
            as_in_torch = any(one.name == "transB" and one.i for one in node.attribute)
            weight = tensors[node.input[1]]
            tensors[_weight_name(node.name, bias)] = weight if as_in_torch else np.transpose(weight)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_RENAMED)}


def _biases(graph: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The name of the tensor that is added to each value."""
    sums = [tuple(node.input) for node in graph.node if node.op_type == "Add"]
    return {value: name for pair in sums for value, name in (pair, pair[::-1]) if name in tensors}


def _weight_name(node: str, bias: str) -> str:
    if bias.endswith(_BIAS):
        return bias.removesuffix(_BIAS) + _WEIGHT
    scopes = node.strip("/").split("/")[:-1]
    # /model/model.0/query/MatMul: the scope of a list stands before those of its items, which name it again.
    scopes = [one for one, inner in zip(scopes, [*scopes[1:], ""], strict=True) if not inner.startswith(f"{one}.")]
    return ".".join(scopes) + _WEIGHT
