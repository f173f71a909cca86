"""What machine this is, in one line, for manifests, profiles and benchmark tables."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, family and model, and the flags that decide which kernels run."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in _TELLING_FLAGS if flag in facts.get("flags", "").split()]
    family = f"family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
    return f"{facts.get('model name', platform.machine())}, {family} ({' '.join(flags)})"


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def gpus(devices: Path = Path("/dev")) -> int:
    """The NVIDIA devices that the driver shows."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


def resident_mb() -> float:
    """The memory that this process holds at present, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def available_mb(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """The memory that this process may still take, in MiB: the machine's, or less where a control group limits it."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) / 2**10
    try:
        limit, held = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, (int(limit) - int(held)) / 2**20)
