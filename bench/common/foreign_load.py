"""How much of the machine other processes use during a measurement."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil


class ForeignLoad:
    """The mean number of cores that processes outside this process tree keep busy between entry and exit.

    own_s: the processor time of this process tree in between, in seconds. Children that a peer detaches from the tree
    count as foreign, and so does time that a virtual machine's host takes.
    """

    cores = 0.0
    own_s = 0.0

    def __enter__(self) -> ForeignLoad:
        self._busy, self._spent_s, self._start = _busy_s(), _own_s(), time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        elapsed = time.monotonic() - self._start
        self.own_s = _own_s() - self._spent_s
        self.cores = max(0.0, (_busy_s() - self._busy) - self.own_s) / max(elapsed, 1e-9)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _own_s() -> float:
    """Of this process, of what it started, and of what these have waited for."""
    total, process = 0.0, psutil.Process()
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
