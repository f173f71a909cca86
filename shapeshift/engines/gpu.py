"""NVIDIA GPUs as their driver describes them. No package is needed, and nothing is allocated on a device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from shapeshift.engines.hardware import cpu_model
from shapeshift.errors import EngineError, UnsupportedError

_DRIVER, _MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
# Attributes of cuDeviceGetAttribute: compute capability, major and minor.
_MAJOR, _MINOR = 75, 76
_NAME_BYTES, _BUS_ID_BYTES = 128, 32
_BF16_SINCE = (8, 0)
CPU_INSTEAD = (
    "to use the CPU, set instance_group [ { kind: KIND_CPU } ] in its config.pbtxt and run `shapeshift engines`"
)
"""What is offered where a GPU cannot be used. Nothing takes the CPU by itself."""
LESS = "lower memory_mb"
"""What helps where its memory is full."""


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


class _Memory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def describe(device: int) -> Gpu:
    """The GPU of this number. Raises UnsupportedError, which says what is missing: the driver, or the device."""
    return _read(_driver(device), device)


def cuda_version(device: int) -> tuple[int, int]:
    """The newest CUDA that the driver of this GPU runs, (major, minor). Raises as `describe`."""
    version = ctypes.c_int()
    _require(_driver(device).cuDriverGetVersion(ctypes.byref(version)), device)
    return version.value // 1000, version.value % 1000 // 10


def free_mb(device: int) -> float:
    """MiB of this GPU's memory that no process uses. Raises as `describe`.

    NVML says it, which needs no context on the device. Where NVML is missing, all of the memory counts as free.
    """
    driver = _driver(device)
    total = _read(driver, device).memory_mb
    handle, bus_id = ctypes.c_int(), ctypes.create_string_buffer(_BUS_ID_BYTES)
    # The numbers of NVML are others: by bus, and without CUDA_VISIBLE_DEVICES.
    status = driver.cuDeviceGet(ctypes.byref(handle), device)
    _require(status or driver.cuDeviceGetPCIBusId(bus_id, _BUS_ID_BYTES, handle), device)
    try:
        management = ctypes.CDLL(_MANAGEMENT)
    except OSError:
        return total
    managed, memory = ctypes.c_void_p(), _Memory()
    failed = (
        management.nvmlInit_v2()
        or management.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(managed))
        or management.nvmlDeviceGetMemoryInfo(managed, ctypes.byref(memory))
    )
    # A slice of a GPU (MIG) has less than the whole.
    return total if failed else min(total, memory.free / 2**20)


def no_memory(device: int, what: str, figures: str, remedy: str = LESS) -> EngineError:
    """The error of a GPU that has no memory for `what`. figures: what is wanted, and what is free."""
    return EngineError(
        f"GPU {device}: no memory for {what}: {figures}; serve fewer models on it, or {remedy}; {CPU_INSTEAD}"
    )


def _driver(device: int) -> Any:
    """The driver, which has this device."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        reason = f"this machine has no NVIDIA driver ({_DRIVER})"
        raise UnsupportedError(f"GPU {device}: {reason}; {CPU_INSTEAD}") from None
    count = ctypes.c_int()
    _require(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)), device)
    if not 0 <= device < count.value:
        reason = f"the NVIDIA driver shows {count.value} devices, numbered from 0"
        raise UnsupportedError(f"GPU {device}: {reason}; name another in instance_group gpus; {CPU_INSTEAD}")
    return driver


def _require(status: int, device: int) -> None:
    if status:
        raise UnsupportedError(f"GPU {device}: the NVIDIA driver reports error {status} (see cuInit); {CPU_INSTEAD}")


def with_cpu(device: int | None) -> str:
    """One line for manifests: the GPU `device`, where one is used, and the CPU. Raises as `describe`."""
    if device is None:
        return cpu_model()
    described = describe(device)
    return f"{described.name}, compute capability {'.'.join(map(str, described.capability))}; {cpu_model()}"


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
    _require(status, device)
    return Gpu(device, name.value.decode(errors="replace"), (major.value, minor.value), memory.value / 2**20)
