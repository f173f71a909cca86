"""Triton's entry point of the fused_decode backend."""

from typing import Any

import triton_python_backend_utils

from shapeshift.fused_decode import settings
from shapeshift.kernels import kernel_build
from shapeshift.serving.front import EntryPoint
from shapeshift.serving.model_args import ModelArgs
from shapeshift.settings import Choices

# Imported when chosen: a model that forwards needs no torch.
FRONTS: Choices[Any] = Choices(
    "front",
    {
        "generate": "shapeshift.fused_decode.front:GenerateFront",
        "forward": "shapeshift.fused_decode.unary:UnaryFront",
    },
)


class TritonPythonModel(EntryPoint):
    """Generates text, or forwards to the model that does (parameter `forward_to`)."""

    pb_utils = triton_python_backend_utils
    signature = staticmethod(settings.signature)

    def open(self, args: ModelArgs) -> Any:
        forwards = "forward_to" in args.parameters
        if not forwards:
            # Before the front imports torch.
            kernel_build.limit_spinning()
            kernel_build.import_torch()
        return FRONTS["forward" if forwards else "generate"](self.pb_utils, args)
