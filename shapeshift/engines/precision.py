"""Which numeric precisions this machine computes natively."""

from __future__ import annotations

from pathlib import Path

from shapeshift.errors import UnsupportedError

_BF16_FLAGS = ("avx512_bf16", "amx_bf16")


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bf16 natively (avx512_bf16 or AMX)."""
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return any(flag in flags.split() for flag in _BF16_FLAGS)


def resolve(stated: str, on_gpu: bool = False) -> str:
    """The precision to build: `stated`, or for "auto" bf16 where the hardware has it and f32 elsewhere.

    Raises UnsupportedError for bf16 on a CPU that would only emulate it.
    """
    has_bf16 = on_gpu or cpu_has_bf16()
    if stated == "auto":
        return "bf16" if has_bf16 else "f32"
    if stated == "bf16" and not has_bf16:
        raise UnsupportedError(
            "precision: bf16 needs a CPU with avx512_bf16 or AMX, which this one lacks; say f32 or auto"
        )
    return stated
