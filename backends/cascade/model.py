"""Triton's entry point of the cascade backend."""

import triton_python_backend_utils

from shapeshift.cascade import settings
from shapeshift.cascade.front import CascadeFront
from shapeshift.serving.front import EntryPoint


class TritonPythonModel(EntryPoint):
    """Classifies texts by a small model, and by larger ones where it is unsure."""

    pb_utils = triton_python_backend_utils
    front = CascadeFront
    signature = staticmethod(settings.signature)
