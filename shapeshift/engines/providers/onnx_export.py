"""Export of a torch module to ONNX."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.engines.interfaces import TOKEN_OUTPUTS, Array
from shapeshift.engines.providers import onnx_precision

MODEL_FILE = "model.onnx"
_OPSET = 17


def export_onnx(module: Any, example: Mapping[str, Array], folder: Path, precision: str = "f32") -> str:
    """Write `module` (see `interfaces.Provider.export`) with dynamic axes, and return the name of the file.

    Products are computed in `precision`, which the types of the graph say; all else stays in f32. Uses torch's tracing
    exporter: its graphs ran faster in ONNX Runtime than those of the dynamo exporter.
    """
    import torch

    axes = dict(module.input_axes)
    axes |= {name: {1: "tokens"} if name in TOKEN_OUTPUTS else {0: "rows"} for name in module.output_names}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(torch.from_numpy(example[name]) for name in module.input_axes),
            str(folder / MODEL_FILE),
            input_names=list(module.input_axes),
            output_names=list(module.output_names),
            dynamic_axes=axes,
            opset_version=_OPSET,
            dynamo=False,
        )
    if precision != "f32":
        onnx_precision.lower(folder / MODEL_FILE, precision, getattr(module, "f32_modules", ()))
    return MODEL_FILE
