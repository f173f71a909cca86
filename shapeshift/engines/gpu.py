"""NVIDIA GPUs as their driver describes them. No package is needed, and nothing is allocated on a device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from shapeshift.engines.hardware import cpu_model
from shapeshift.errors import UnsupportedError

_DRIVER = "libcuda.so.1"
# Attributes of cuDeviceGetAttribute: compute capability, major and minor.
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 128
_BF16_SINCE = (8, 0)


@dataclass(frozen=True)
class Gpu:
    """device: its number; capability: (major, minor); memory_mb: in all, in MiB."""

    device: int
    name: str
    capability: tuple[int, int]
    memory_mb: float

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 natively."""
        return self.capability >= _BF16_SINCE


def describe(device: int) -> Gpu:
    """The GPU of this number. Raises UnsupportedError, which says what is missing: the driver, or the device."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        raise UnsupportedError(f"GPU {device}: this machine has no NVIDIA driver ({_DRIVER}); use a CPU") from None
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        raise UnsupportedError(f"GPU {device}: the NVIDIA driver reports error {status} (see cuInit); use a CPU")
    if not 0 <= device < count.value:
        raise UnsupportedError(f"GPU {device}: the NVIDIA driver shows {count.value} devices, numbered from 0")
    return _read(driver, device)


def with_cpu(device: int | None) -> str:
    """One line for manifests: the GPU `device`, where one is used, and the CPU. Raises as `describe`."""
    if device is None:
        return cpu_model()
    found = describe(device)
    return f"{found.name}, compute capability {'.'.join(map(str, found.capability))}; {cpu_model()}"


def _read(driver: Any, device: int) -> Gpu:
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    status = (
        driver.cuDeviceGet(ctypes.byref(handle), device)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle)
        or driver.cuDeviceGetName(name, _NAME_BYTES, handle)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    )
    if status:
        raise UnsupportedError(f"GPU {device}: the NVIDIA driver reports error {status}; use a CPU")
    return Gpu(device, name.value.decode(errors="replace"), (major.value, minor.value), memory.value / 2**20)
