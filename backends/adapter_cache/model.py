"""Triton's entry point of the adapter_cache backend."""

from typing import Any

import triton_python_backend_utils as pb_utils

from shapeshift.errors import ShapeshiftError
from shapeshift.fused_decode import settings
from shapeshift.fused_decode.model import kernel_build
from shapeshift.serving import model_args
from shapeshift.serving.pb_utils import InferenceRequest, ModelConfig, Returned
from shapeshift.settings import Choices

# Imported when chosen: a model that forwards needs no torch.
FRONTS: Choices[Any] = Choices(
    "front",
    {
        "generate": "shapeshift.adapter_cache.front:LoraFront",
        "forward": "shapeshift.fused_decode.unary:UnaryFront",
    },
)


class TritonPythonModel:
    """Generates text with adapters, or forwards to the model that does; replies through the response senders."""

    @staticmethod
    def auto_complete_config(config: ModelConfig) -> ModelConfig:
        return model_args.auto_complete(pb_utils, config, settings.signature)

    def initialize(self, args: dict[str, str]) -> None:
        given = model_args.read(args)
        forwards = "forward_to" in given.parameters
        if not forwards:
            # Before the front imports torch.
            kernel_build.limit_spinning()
            kernel_build.import_torch()
        try:
            self._front = FRONTS["forward" if forwards else "generate"](pb_utils, given)
        except ShapeshiftError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[InferenceRequest]) -> Returned:
        returned: Returned = self._front.execute(requests)
        return returned

    def finalize(self) -> None:
        self._front.close()
        model_args.skip_last_collections()
