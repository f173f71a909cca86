"""The machine of a measurement, as the operating system describes it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

from shapeshift.engines.hardware import cores, cpu_model

_NVIDIA_SMI_S = 10


def describe() -> dict[str, object]:
    """Processor, cores this process may use, memory in GiB, GPUs, system, Python and one-minute load."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": _memory_gib(),
        "gpu": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        command = [program, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") or None
