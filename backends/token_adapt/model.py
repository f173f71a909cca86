"""Triton's entry point of the token_adapt backend."""

import sys

import triton_python_backend_utils as pb_utils

from shapeshift.errors import ShapeshiftError
from shapeshift.serving import model_args
from shapeshift.serving.pb_utils import InferenceRequest, ModelConfig, Returned
from shapeshift.token_adapt import settings
from shapeshift.token_adapt.front import ImageFront


class TritonPythonModel:
    """Classifies images; responses go through response senders."""

    @staticmethod
    def auto_complete_config(config: ModelConfig) -> ModelConfig:
        return model_args.auto_complete(pb_utils, config, settings.signature)

    def initialize(self, args: dict[str, str]) -> None:
        # How long the executor waits for decoding and response threads to release the interpreter, in seconds.
        sys.setswitchinterval(0.0005)
        try:
            self._front = ImageFront(pb_utils, model_args.read(args))
        except ShapeshiftError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[InferenceRequest]) -> Returned:
        return self._front.execute(requests)

    def finalize(self) -> None:
        self._front.close()
        model_args.skip_last_collections()
