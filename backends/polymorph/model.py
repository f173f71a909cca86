"""Triton's entry point of the polymorph backend."""

import triton_python_backend_utils

from shapeshift.polymorph import settings
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.worker import TextWorker
from shapeshift.serving.front import EntryPoint
from shapeshift.serving.model_args import ModelArgs


class TritonPythonModel(EntryPoint):
    """Encodes texts of any length. A front answers requests later; a worker (parameter `worker_of`) at once."""

    pb_utils = triton_python_backend_utils
    signature = staticmethod(settings.signature)

    def open(self, args: ModelArgs) -> TextFront | TextWorker:
        kind = TextWorker if args.parameters.get("worker_of") else TextFront
        return kind(self.pb_utils, args)
