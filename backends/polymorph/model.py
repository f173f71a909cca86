"""Triton's entry point of the polymorph backend."""

import triton_python_backend_utils as pb_utils

from shapeshift.errors import ShapeshiftError
from shapeshift.polymorph import settings
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.worker import TextWorker
from shapeshift.serving import model_args
from shapeshift.serving.pb_utils import InferenceRequest, ModelConfig, Returned


class TritonPythonModel:
    """Encodes texts of any length.

    A front answers requests later, through their response senders; a worker (parameter `worker_of`) at once.
    """

    @staticmethod
    def auto_complete_config(config: ModelConfig) -> ModelConfig:
        return model_args.auto_complete(pb_utils, config, settings.signature)

    def initialize(self, args: dict[str, str]) -> None:
        given = model_args.read(args)
        kind = TextWorker if given.parameters.get("worker_of") else TextFront
        try:
            self._model = kind(pb_utils, given)
        except ShapeshiftError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[InferenceRequest]) -> Returned:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
        model_args.skip_last_collections()
