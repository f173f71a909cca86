"""A fake of NVIDIA's driver, for `ctypes.CDLL` to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Driver:
    """Stands for NVIDIA's driver: so many GPUs of this capability; status: what each call returns."""

    def __init__(self, devices: int, capability: tuple[int, int] = (9, 0), status: int = 0) -> None:
        self.devices, self.capability, self.status = devices, capability, status

    def cuInit(self, flags: int) -> int:  # noqa: N802  the driver's name
        return self.status

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(out: Any, *others: Any) -> int:
            if name == "cuDeviceGetName":
                out.value = b"H100"
                return 0
            value = {
                "cuDeviceGetCount": self.devices,
                "cuDeviceGet": 0,
                "cuDeviceGetAttribute": self.capability[0 if others[:1] == (75,) else 1],
                "cuDeviceTotalMem_v2": 80 << 30,
            }[name]
            out._obj.value = value
            return 0

        return call
