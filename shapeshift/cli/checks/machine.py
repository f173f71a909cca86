"""What this machine can do: CPU, memory, disk, GPU and ports."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from shapeshift.cli import gateway
from shapeshift.cli.checks.finding import MISSING, NOTE, OK, Finding
from shapeshift.engines import capacity, hardware
from shapeshift.triton.embedded.free_ports import why_taken
from shapeshift.triton.settings import ServerSettings

_GIB = 2**30
_DRIVER = Path("/proc/driver/nvidia/version")
_PCI, _NVIDIA = Path("/sys/bus/pci/devices"), "0x10de"
_SHARED_MEMORY = Path("/dev/shm")
# A model's process begins with a megabyte and grows with its requests; Docker gives a container 64 MiB.
_LEAST_SHARED, _FEW_SHARED = 16 * 2**20, 256 * 2**20
_LEAST_DISK, _LITTLE_DISK = _GIB, 5 * _GIB


def check(build: Path) -> list[Finding]:
    """All findings; `build`: the build folder, which may be missing."""
    return [_cpu(), _precision(), _capacity(), shared_memory(_free(_SHARED_MEMORY)), _gpu(), _disk(build), ports()]


def _cpu() -> Finding:
    flags = hardware.cpu_model()
    if platform.machine() != "x86_64" or "avx2" not in flags:
        return Finding("cpu", MISSING, f"{flags}: the server and its libraries need x86-64 with avx2")
    return Finding("cpu", OK, flags)


def _precision() -> Finding:
    auto = hardware.resolve_precision("auto")
    why = "" if auto == "bf16" else ": no avx512_bf16 and no AMX, so bf16 would be emulated"
    return Finding("precision", OK, f"auto is {auto} for openvino and text generation, f32 for onnxruntime{why}")


def _capacity() -> Finding:
    machine = capacity.this_machine()
    return Finding("capacity", OK, capacity.fit((), machine)[0].partition(";")[0])


def shared_memory(free: int) -> Finding:
    """Of `free` bytes."""
    text = f"{free / 2**20:.0f} MiB free in {_SHARED_MEMORY}"
    if free < _LEAST_SHARED:
        return Finding("shared memory", MISSING, f"{text}: each model needs some; in Docker set --shm-size=1g")
    if free < _FEW_SHARED:
        return Finding("shared memory", NOTE, f"{text}: large batches need more; in Docker set --shm-size=1g")
    return Finding("shared memory", OK, text)


def _gpu() -> Finding:
    count = hardware.gpus()
    if not count:
        absent = "no NVIDIA device in /dev: models run on the CPU"
        if _DRIVER.exists():
            absent += "; there is a driver: a container gets the devices with `docker run --gpus all`"
        elif any(file.read_text().strip() == _NVIDIA for file in _PCI.glob("*/vendor")):
            absent += "; the machine has a card of NVIDIA, but no driver: install it"
        return Finding("gpu", NOTE, absent)
    try:
        version = re.search(r"Kernel Module\D*([\d.]+)", _DRIVER.read_text())
    except OSError:
        version = None
    return Finding("gpu", OK, f"{count} NVIDIA devices, driver {version[1] if version else 'unknown'}")


def _disk(folder: Path) -> Finding:
    """Of the file system that holds `folder`, or its nearest parent that exists."""
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    usage = shutil.disk_usage(place)
    return disk(place, usage.free, usage.total)


def disk(place: Path, free: int, total: int) -> Finding:
    """Of a folder, on a file system with so many bytes."""
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Finding("disk", NOTE, f"{text}, which this user cannot write: nothing can be built there")
    if free < _LEAST_DISK:
        return Finding("disk", MISSING, f"{text}: logs, engines and kernels need at least {_LEAST_DISK / _GIB:.0f} GiB")
    if free < _LITTLE_DISK:
        return Finding("disk", NOTE, f"{text}: a set-up and the engines of the demo take about 3 GiB")
    return Finding("disk", OK, text)


def ports(
    numbers: Iterable[int] = (
        ServerSettings.http_port,
        ServerSettings.grpc_port,
        ServerSettings.metrics_port,
        gateway.DEFAULT_PORT,
    ),
) -> Finding:
    """Whether the server and its gateway can bind to these ports of 127.0.0.1."""
    taken = [number for number in numbers if why_taken("127.0.0.1", number)]
    if taken:
        listed = ", ".join(map(str, taken))
        return Finding(
            "ports",
            NOTE,
            f"in use: {listed}; `serve` needs others, by --http-port, --gateway-port and the like",
        )
    return Finding("ports", OK, f"{', '.join(map(str, numbers))} are free")


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
