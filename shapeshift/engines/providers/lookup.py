"""The engine providers by name. Each is imported at its first use."""

from __future__ import annotations

from pathlib import Path

from shapeshift.engines.interfaces import Provider
from shapeshift.settings import Choices

PROVIDERS: Choices[Provider] = Choices(
    "provider",
    {
        "openvino": "shapeshift.engines.providers.openvino:PROVIDER",
        "onnxruntime": "shapeshift.engines.providers.onnxruntime:PROVIDER",
        "torch": "shapeshift.engines.providers.torch:PROVIDER",
        "tensorrt": "shapeshift.engines.providers.tensorrt:PROVIDER",
        "emulated": "shapeshift.engines.providers.emulated:PROVIDER",
    },
)

_ON_GPU = ("onnxruntime", "tensorrt", "torch")


def resolve(requested: str) -> str:
    """The name of the provider to build with: `requested`, or for "auto" torch on an NVIDIA GPU, else OpenVINO."""
    if requested != "auto":
        return requested
    return "torch" if has_nvidia_gpu() else "openvino"


def device(provider: str) -> int | None:
    """The GPU on which a provider's engines are built and measured; None where they run on the CPU."""
    return 0 if provider in _ON_GPU and has_nvidia_gpu() else None


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver shows a device."""
    return Path("/dev/nvidia0").exists()
