"""Which provider builds the engines of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from shapeshift.engines.interfaces import PROVIDERS, Provider
from shapeshift.errors import UnsupportedError

ON_GPU = ("onnxruntime", "tensorrt", "torch")
OF_ANY_LENGTH = ("native",)
"""They compile nothing for a length: an engine of one is no faster than that of any. All map one file of weights."""


def resolve(requested: str, gpus: Sequence[int]) -> str:
    """The name of the provider to build with: `requested`, or for "auto" torch with a GPU, else OpenVINO.

    gpus: those that the model may use.
    """
    if requested != "auto":
        return requested
    return "torch" if gpus else "openvino"


def rival(requested: str, gpus: Sequence[int]) -> Provider | None:
    """The provider that "auto" takes instead of `resolve`'s where its engines are faster: TensorRT, if installed."""
    if requested != "auto" or not gpus:
        return None
    provider = PROVIDERS["tensorrt"]
    with contextlib.suppress(UnsupportedError):
        provider.version()
        return provider
    return None


def usable(provider: str, gpus: Sequence[int]) -> Sequence[int]:
    """Those of `gpus` that the provider's engines run on, the first of which builds them; empty: the CPU."""
    return gpus if provider in ON_GPU else ()
