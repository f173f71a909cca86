"""Triton's entry point of the cascade backend."""

import triton_python_backend_utils as pb_utils

from shapeshift.cascade import settings
from shapeshift.cascade.front import CascadeFront
from shapeshift.errors import ShapeshiftError
from shapeshift.serving import model_args
from shapeshift.serving.pb_utils import InferenceRequest, ModelConfig, Returned


class TritonPythonModel:
    """Classifies texts by a small model, and by larger ones where it is unsure; answers through response senders."""

    @staticmethod
    def auto_complete_config(config: ModelConfig) -> ModelConfig:
        return model_args.auto_complete(pb_utils, config, settings.signature)

    def initialize(self, args: dict[str, str]) -> None:
        try:
            self._front = CascadeFront(pb_utils, model_args.read(args))
        except ShapeshiftError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[InferenceRequest]) -> Returned:
        return self._front.execute(requests)

    def finalize(self) -> None:
        self._front.close()
        model_args.skip_last_collections()
