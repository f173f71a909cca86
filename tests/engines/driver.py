"""Fakes of NVIDIA's driver and of its management library, for `ctypes.CDLL` to give."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest


class Driver:
    """Stands for NVIDIA's driver: so many GPUs of this capability; status: what cuInit returns.

    cuda: what it runs, as cuDriverGetVersion has it. broken: the name of another call, which returns 7.
    """

    broken = ""

    def __init__(self, devices: int, capability: tuple[int, int] = (9, 0), status: int = 0, cuda: int = 13020) -> None:
        self.devices, self.capability, self.status, self.cuda = devices, capability, status, cuda

    def cuInit(self, flags: int) -> int:  # noqa: N802  the driver's name
        return self.status

    def cuDeviceGetPCIBusId(self, out: Any, size: int, handle: Any) -> int:  # noqa: N802  the driver's name
        assert size >= 13
        out.value = f"0000:0{handle.value}:00.0".encode()
        return 7 if self.broken == "cuDeviceGetPCIBusId" else 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(out: Any, *others: Any) -> int:
            if name == self.broken:
                return 7
            if name == "cuDeviceGetName":
                out.value = b"H100"
                return 0
            value = {
                "cuDeviceGetCount": self.devices,
                "cuDeviceGet": others[0] if others else 0,
                "cuDeviceGetAttribute": self.capability[0 if others[:1] == (75,) else 1],
                "cuDeviceTotalMem_v2": 80 << 30,
                "cuDriverGetVersion": self.cuda,
            }[name]
            out._obj.value = value
            return 0

        return call


class Management:
    """Stands for NVML: the free MiB of each GPU, in the order of the driver's numbers; broken: what returns 7."""

    broken = ""

    def __init__(self, free_mb: list[int], status: int = 0) -> None:
        self.free_mb, self.status = free_mb, status

    def nvmlInit_v2(self) -> int:  # noqa: N802  the library's name
        return self.status

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, out: Any) -> int:  # noqa: N802  the library's name
        out._obj.value = 100 + int(bus_id.value.split(b":")[1])
        return 7 if self.broken == "nvmlDeviceGetHandleByPciBusId_v2" else 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:  # noqa: N802  the library's name
        out._obj.free = self.free_mb[handle.value - 100] << 20
        return 7 if self.broken == "nvmlDeviceGetMemoryInfo" else 0


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, management: Management | None = None) -> None:
    """Let `ctypes.CDLL` give these; None: not installed."""
    libraries = {"libcuda.so.1": driver, "libnvidia-ml.so.1": management}

    def load(name: str) -> Any:
        if libraries[name] is None:
            raise OSError(name)
        return libraries[name]

    monkeypatch.setattr(ctypes, "CDLL", load)
