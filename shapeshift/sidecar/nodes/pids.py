"""Numbers of processes over several machines, each of which counts its own from 1."""

from __future__ import annotations

from collections.abc import Sequence

# Above every pid of Linux.
_PER_HOST = 1 << 32


def pid_on(host: int, pid: int) -> int:
    """A number for the process `pid` of the machine `host`: the pid itself on machine 0, this one."""
    return host * _PER_HOST + pid


def own_pid(number: int) -> int:
    """The pid on its machine of the process with this number."""
    return number % _PER_HOST


def listed(numbers: Sequence[int]) -> str:
    """`process 12, 34`: the processes with these numbers, by their pids."""
    return f"process {', '.join(str(own_pid(number)) for number in numbers)}"
