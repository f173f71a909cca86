"""Which provider builds the engines of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from shapeshift.engines import hardware
from shapeshift.engines.interfaces import PROVIDERS, Provider
from shapeshift.engines.native import layouts
from shapeshift.errors import UnsupportedError
from shapeshift.kernels import kernel_build

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


def rival(requested: str, gpus: Sequence[int], config: Mapping[str, Any]) -> Provider | None:
    """The provider that "auto" takes instead of `resolve`'s where its engines are faster.

    On a GPU TensorRT, if installed; else native, if it has kernels for a text model of this config.json.
    """
    if requested != "auto" or (not gpus and layouts.refusal(config)):
        return None
    provider = PROVIDERS["tensorrt" if gpus else "native"]
    with contextlib.suppress(UnsupportedError):
        provider.version()
        return provider
    return None


def is_native_faster(config: Mapping[str, Any]) -> bool:
    """Whether "native" is known to be faster here for short texts of a model of this config.json: none need measure.

    As far as it was measured: with AVX2 by a third, with AVX-512 by up to 1.9 times; AMX was not measured.
    """
    is_measured = not hardware.gpus() and "amx_tile" not in kernel_build.cpu_flags().split()
    return is_measured and rival("auto", (), config) is not None


def usable(provider: str, gpus: Sequence[int]) -> Sequence[int]:
    """Those of `gpus` that the provider's engines run on, the first of which builds them; empty: the CPU."""
    return gpus if provider in ON_GPU else ()
