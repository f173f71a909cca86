"""A worker that Triton's own backends serve: a model whose versions are bins, with the tensors of an engine.

One version is loaded, the worker's bin; see `version_of`. Requests have the engine's shape, see `engines.interfaces`;
there is no STATE. Parameter `bin_shapes`, JSON {bin: [tokens, rows, version]}: the shape of each bin's engine, -1 for
any size, and the version that is this engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shapeshift.engines.interfaces import INPUT_AXES, TOKEN_OUTPUTS
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.polymorph.service_times import bin_edges, entry_of_bin

FILES = {"onnxruntime": "model.onnx", "tensorrt": "model.plan"}
"""By provider, whose name is also the backend's: the file that the backend loads from a version's folder."""
PARAMETERS = {"onnxruntime": {"intra_op_thread_count": "1", "inter_op_thread_count": "1"}}
"""By provider: what the backend needs to compute as the engines were profiled, on one thread."""
SHAPES = "bin_shapes"
_SHAPE = ("tokens", "rows", "version")
_ANY = -1
# The last six digits of a version are the bin, the digits before them stand for the engines: 18 digits are the most of
# an INT64.
_BINS, _ENGINES = 10**6, 10**12


def bin_shapes(manifest: Manifest) -> str:
    """The parameter `bin_shapes` for these engines."""
    entries = {edge: entry_of_bin(manifest, edge) for edge in bin_edges(manifest)}
    shapes = {
        edge: [entry.tokens or _ANY, entry.rows or _ANY, version_of(manifest, edge)] for edge, entry in entries.items()
    }
    return json.dumps(shapes)


def version_of(manifest: Manifest, edge: int) -> int:
    """The version of a worker that is the engine of the bin `edge`.

    Such a worker does not say which engines it has. A request for a version gets no answer of other engines.
    """
    return manifest.answers_version() % _ENGINES * _BINS + edge


def tensors(manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
    """The inputs and outputs of a ModelConfig in JSON, of any shape."""
    inputs = [
        (name, "TYPE_INT64", [_ANY if axis in axes else 1 for axis in range(max(axes) + 1)])
        for name, axes in INPUT_AXES.items()
    ]
    outputs = [
        (output.name, output.data_type, [1 if output.name in TOKEN_OUTPUTS else _ANY, *output.dims])
        for output in manifest.outputs
    ]
    return {"input": [_tensor(*one) for one in inputs], "output": [_tensor(*one) for one in outputs]}


def is_engine_model(config: Mapping[str, Any]) -> bool:
    """Whether a ModelConfig in JSON is that of such a worker."""
    return SHAPES in config.get("parameters", {})


def place(config: dict[str, Any], bin_edge: int) -> None:
    """Let the worker with this ModelConfig in JSON, changed in place, load one bin.

    Raises InvalidInputError for a bin that it does not have, EngineError for a worker that an older version has made.
    """
    shapes = json.loads(config["parameters"][SHAPES]["string_value"])
    if str(bin_edge) not in shapes:
        raise InvalidInputError("bin", bin_edge, f"one of {', '.join(shapes)}")
    shape = shapes[str(bin_edge)]
    if not isinstance(shape, list) or len(shape) != len(_SHAPE):
        raise EngineError(
            f"{SHAPES} of bin {bin_edge}: got {shape}, not [{', '.join(_SHAPE)}]: another version of Shapeshift has "
            "made this worker; run `make engines`, and load it again"
        )
    tokens, rows, version = shape
    sizes = {"tokens": tokens, "rows": rows}
    for tensor in config["input"]:
        for axis, size in INPUT_AXES[tensor["name"]].items():
            tensor["dims"][axis] = sizes[size]
    for tensor in config["output"]:
        axis, size = (1, tokens) if tensor["name"] in TOKEN_OUTPUTS else (0, rows)
        tensor["dims"][axis] = size
    config["version_policy"] = {"specific": {"versions": [version]}}


def _tensor(name: str, data_type: str, dims: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": list(dims)}
