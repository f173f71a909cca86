"""Triton's entry point of the polymorph backend."""

from typing import Any

import triton_python_backend_utils

from shapeshift.polymorph import settings
from shapeshift.serving.front import EntryPoint
from shapeshift.serving.model_args import ModelArgs
from shapeshift.settings import Choices

MODELS: Choices[Any] = Choices(
    "model",
    {
        "front": "shapeshift.polymorph.front:TextFront",
        "adapters": "shapeshift.adapter_cache.text.entry:open_front",
        "worker": "shapeshift.polymorph.worker:TextWorker",
    },
)


class TritonPythonModel(EntryPoint):
    """Encodes texts of any length. A front answers requests later; a worker (parameter `worker_of`) at once.

    A front that states `adapter_mb` takes LoRA adapters.
    """

    pb_utils = triton_python_backend_utils
    signature = staticmethod(settings.signature)

    def open(self, args: ModelArgs) -> Any:
        name = "adapters" if "adapter_mb" in args.parameters else "front"
        return MODELS["worker" if args.parameters.get("worker_of") else name](self.pb_utils, args)
