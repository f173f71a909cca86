"""Opens the front of a text model with adapters, which a backend names."""

from __future__ import annotations

from typing import Any

from shapeshift.kernels import kernel_build
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.pb_utils import PbUtils


def open_front(pb_utils: PbUtils, args: ModelArgs) -> Any:
    """A `LoraTextFront`."""
    # Before the front imports torch.
    kernel_build.limit_spinning()
    kernel_build.import_torch()
    from shapeshift.adapter_cache.text.front import LoraTextFront

    return LoraTextFront(pb_utils, args)
