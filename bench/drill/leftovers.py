"""What the processes of a run hold: memory, descriptors, threads, shared memory. Reads /proc and /dev/shm."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SHM = Path("/dev/shm")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Footprint:
    """Of one process, or the sum of several."""

    processes: int = 0
    rss_mb: float = 0.0
    fds: int = 0
    threads: int = 0
    regions: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.processes + other.processes,
            self.rss_mb + other.rss_mb,
            self.fds + other.fds,
            self.threads + other.threads,
            self.regions + other.regions,
        )


def of_process(pid: int) -> Footprint:
    """What the process holds now; nothing if it has ended."""
    folder = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):
        pages = int((folder / "statm").read_text().split()[1])
        return Footprint(1, pages * _PAGE_MB, _entries(folder / "fd"), _entries(folder / "task"))
    return Footprint()


def total(pids: Iterable[int], prefixes: Iterable[str], shm: Path = _SHM) -> Footprint:
    """What the processes hold together, with all shared-memory regions whose names begin with one of `prefixes`.

    shm: the folder of the regions.
    """
    beginnings = tuple(prefixes)
    regions = sum(file.name.startswith(beginnings) for file in shm.iterdir()) if beginnings else 0
    return sum((of_process(pid) for pid in pids), Footprint(regions=regions))


def by_name(processes: Mapping[str, int]) -> dict[str, Footprint]:
    """What each of the named processes holds."""
    return {name: of_process(pid) for name, pid in processes.items()}


def _entries(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())
