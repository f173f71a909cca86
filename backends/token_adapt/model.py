"""Triton's entry point of the token_adapt backend."""

import sys

import triton_python_backend_utils

from shapeshift.serving.front import EntryPoint
from shapeshift.serving.model_args import ModelArgs
from shapeshift.token_adapt import settings
from shapeshift.token_adapt.front import ImageFront


class TritonPythonModel(EntryPoint):
    """Classifies images."""

    pb_utils = triton_python_backend_utils
    front = ImageFront
    signature = staticmethod(settings.signature)

    def open(self, args: ModelArgs) -> ImageFront:
        # How long the executor waits for decoding and response threads to release the interpreter, in seconds.
        sys.setswitchinterval(0.0005)
        return ImageFront(self.pb_utils, args)
