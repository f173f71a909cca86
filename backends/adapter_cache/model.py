"""Triton's entry point of the adapter_cache backend."""

from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from shapeshift.errors import ShapeshiftError
from shapeshift.serving import model_args


class TritonPythonModel:
    """Generates text with adapters, or forwards to the model that does; answers go through response senders."""

    def initialize(self, args: dict[str, str]) -> None:
        try:
            self._front = self._open(model_args.read(args))
        except ShapeshiftError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        self._front.execute(requests)

    def finalize(self) -> None:
        self._front.close()

    def _open(self, args: model_args.ModelArgs) -> Any:
        # Only what is needed is imported: a model that forwards needs no torch.
        if "forward_to" in args.parameters:
            from shapeshift.fused_decode.unary import UnaryFront

            return UnaryFront(pb_utils, args)
        from shapeshift.fused_decode import waiting

        # Before torch is imported, which comes with the front.
        waiting.arrange()
        from shapeshift.adapter_cache.room import AdapterRoom
        from shapeshift.fused_decode.front import GenerateFront

        return GenerateFront(pb_utils, args, partial(AdapterRoom, pb_utils))
