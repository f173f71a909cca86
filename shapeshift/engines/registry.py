"""The providers by name. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shapeshift.engines.protocol import Provider
from shapeshift.errors import InvalidInputError

_MODULES = {
    "openvino": "shapeshift.engines.openvino_provider",
    "onnxruntime": "shapeshift.engines.onnxruntime_provider",
    "tensorrt": "shapeshift.engines.tensorrt_provider",
    "emulated": "shapeshift.engines.emulated_provider",
}
NAMES = tuple(_MODULES)


def provider(name: str) -> Provider:
    """The provider called `name`; raises InvalidInputError with the known names."""
    if name not in _MODULES:
        raise InvalidInputError("provider", name, f"one of {', '.join(NAMES)}")
    made: Provider = importlib.import_module(_MODULES[name]).PROVIDER
    return made


def resolve(stated: str) -> str:
    """The provider to build with: `stated`, or for "auto" TensorRT on an NVIDIA GPU, else OpenVINO."""
    if stated != "auto":
        return stated
    return "tensorrt" if has_nvidia_gpu() and importlib.util.find_spec("tensorrt") else "openvino"


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver shows a device."""
    return Path("/dev/nvidia0").exists()
