"""How much of the machine other processes use during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the command: parent at 1, then user and system time, own and of ended children.
_PARENT, _TIMES = 1, slice(11, 15)


class ForeignLoad:
    """The mean number of cores that processes outside this process tree keep busy between entry and exit.

    own_s: the processor time of this process tree in between, in seconds. Children that a peer detaches from the tree
    count as foreign, and so does time that a virtual machine's host takes.
    """

    cores = 0.0
    own_s = 0.0

    def __enter__(self) -> ForeignLoad:
        self._busy, self._own, self._start = _busy_s(), _own_s(), time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        elapsed = time.monotonic() - self._start
        self.own_s = _own_s() - self._own
        self.cores = max(0.0, (_busy_s() - self._busy) - self.own_s) / max(elapsed, 1e-9)


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, fields[:8])
    return (user + nice + system + irq + softirq + stolen) * _TICK_S


def _own_s() -> float:
    parents: dict[int, int] = {}
    times: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        pid = int(folder.name)
        parents[pid] = int(fields[_PARENT])
        times[pid] = sum(map(int, fields[_TIMES]))
    return sum(ticks for pid, ticks in times.items() if _descends(pid, parents)) * _TICK_S


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid == os.getpid():
            return True
        pid = parents[pid]
    return False
