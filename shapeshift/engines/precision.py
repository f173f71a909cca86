"""The precision of the engines of encoders and image models."""

from __future__ import annotations

from shapeshift.engines import gpu, hardware
from shapeshift.errors import UnsupportedError


def resolve(requested: str, provider: str, device: int | None) -> str:
    """The precision to build: `requested`, or for "auto" the fastest that is native there, at least 16 bits.

    device: the number of the GPU that the provider uses, None for the CPU. Raises UnsupportedError for what the device
    only emulates.
    """
    if requested == "auto" and provider == "onnxruntime":
        # Its CPU kernels do not support bf16.
        return "f32"
    if device is None:
        if requested == "f16":
            raise UnsupportedError("precision: f16 is for GPUs; on a CPU set f32, bf16 or auto")
        return hardware.resolve_precision(requested)
    if requested in ("f32", "f16"):
        return requested
    found = gpu.describe(device)
    if requested == "bf16" and not found.has_bf16:
        capability = ".".join(map(str, found.capability))
        raise UnsupportedError(
            f"precision: bf16 needs compute capability 8.0; GPU {device} ({found.name}) has {capability}; set f16"
        )
    return "bf16" if found.has_bf16 else "f16"
