"""The hardware of this machine: CPU, precisions, cores, GPUs and memory."""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shapeshift.errors import UnsupportedError
from shapeshift.settings import Choices

PRECISIONS = ("auto", "f32", "bf16", "f16")
_REPORTED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_BF16_FLAGS = ("avx512_bf16", "amx_bf16")
DEVICE_MEMORY: Choices[Callable[[int], tuple[float, str]]] = Choices(
    "device", {"cuda": "shapeshift.engines.cuda_device:free_memory"}
)
"""By kind of device, what is free on the one of a number: see `cuda_device.free_memory`, which imports torch."""
GPUS: Choices[Any] = Choices("device", {"cuda": "shapeshift.engines.gpu:describe"})
"""By kind of device, what the one of a number is, see `gpu.Gpu`."""


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """One line for manifests and tables: the CPU's name, family and model, and the flags that select kernels."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in _REPORTED_FLAGS if flag in facts.get("flags", "").split()]
    family = f"family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
    return f"{facts.get('model name', platform.machine())}, {family} ({' '.join(flags)})"


def cores(root: Path = Path("/")) -> int:
    """The number of cores that this process may use, within its control groups (rounded up). root: has /proc, /sys."""
    quotas = map(_quota, _control_groups(root, "cpu"))
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *quotas])))


def gpus(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA devices that the driver shows."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


def resident_mb() -> float:
    """The resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def available_mb(root: Path = Path("/")) -> float:
    """The memory that this process can still allocate, in MiB, within its control groups. root: has /proc and /sys."""
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 2**10
    return max(0.0, min([free, *map(_left, _control_groups(root, "memory"))])) / 2**20


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bf16 natively (avx512_bf16 or AMX)."""
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return any(flag in flags.split() for flag in _BF16_FLAGS)


def resolve_precision(requested: str, provider: str = "", device: int | None = None) -> str:
    """The precision to build: `requested`, or for "auto" the fastest that is native there, at least 16 bits.

    provider: of engines, empty for none. device: the number of the GPU that is used, None for the CPU. Raises
    UnsupportedError for what the device lacks or only emulates.
    """
    if requested == "int8":
        if provider not in ("", "native"):
            raise UnsupportedError("precision: int8 is for text models of provider native; set provider native or auto")
        return requested
    if requested == "auto" and provider == "onnxruntime":
        # Its CPU kernels do not support bf16.
        return "f32"
    if device is not None:
        return _of_gpu(requested, device)
    if requested == "f16":
        raise UnsupportedError("precision: f16 is for GPUs; on a CPU set f32, bf16 or auto")
    has_bf16 = cpu_has_bf16()
    if requested == "auto":
        return "bf16" if has_bf16 else "f32"
    if requested == "bf16" and not has_bf16:
        raise UnsupportedError(
            "precision: bf16 needs a CPU with avx512_bf16 or AMX, which this one lacks; set f32 or auto"
        )
    return requested


def _of_gpu(requested: str, device: int) -> str:
    if requested in ("f32", "f16"):
        return requested
    gpu = GPUS["cuda"](device)
    if requested == "bf16" and not gpu.has_bf16:
        capability = ".".join(map(str, gpu.capability))
        raise UnsupportedError(
            f"precision: bf16 needs compute capability 8.0; GPU {device} ({gpu.name}) has {capability}; set f16"
        )
    return "bf16" if gpu.has_bf16 else "f16"


def give_back_freed_memory() -> None:
    """Give memory that this process has freed back to the system. Nothing happens where the C library is not glibc.

    glibc keeps what is freed below something that is still in use (malloc_trim(3)). Packing the weights of a large
    model leaves as much as the packed ones take.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control group that has `controller`, and of those above it, whose limits hold too.

    See cgroups(7). Both versions are read, and their mixture.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            # The mount of version 2, or what systemd mounts beside version 1.
            mounts = [top, top / "unified"]
        elif controller in controllers.split(","):
            mounts = [top / controller]
        else:
            continue
        for mount in mounts:
            # A container may see its own group as the mount, and read the path that its host sees.
            folder = mount / path.lstrip("/")
            while folder != mount and mount in folder.parents:
                yield folder
                folder = folder.parent
            yield mount


def _quota(folder: Path) -> float:
    """The quota of one group in cores."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        # Version 1 writes -1 for none.
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def _left(folder: Path) -> float:
    """The bytes that one group may still allocate. Pages of files that were not used recently count as free."""
    try:
        if (folder / "memory.max").exists():
            names, unused = ("memory.max", "memory.current"), "inactive_file"
        else:
            names, unused = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        # Only "max" is no number, and no limit.
        limit, used = (int((folder / name).read_text()) for name in names)
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(stat[unused])
    except (OSError, ValueError, KeyError):
        return math.inf
