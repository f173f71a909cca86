"""The engine providers by name. Each is imported at its first use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shapeshift.engines.interfaces import Provider
from shapeshift.settings import Choices

PROVIDERS: Choices[Provider] = Choices(
    "provider",
    {
        "openvino": "shapeshift.engines.providers.openvino:PROVIDER",
        "onnxruntime": "shapeshift.engines.providers.onnxruntime:PROVIDER",
        "tensorrt": "shapeshift.engines.providers.tensorrt:PROVIDER",
        "emulated": "shapeshift.engines.providers.emulated:PROVIDER",
    },
)


def resolve(requested: str) -> str:
    """The name of the provider to build with: `requested`, or for "auto" TensorRT on an NVIDIA GPU, else OpenVINO."""
    if requested != "auto":
        return requested
    return "tensorrt" if has_nvidia_gpu() and importlib.util.find_spec("tensorrt") else "openvino"


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver shows a device."""
    return Path("/dev/nvidia0").exists()
