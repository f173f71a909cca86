"""The processes of models: which of them live, and which have just ended.

The kernel tells at once when a process of this machine ends (pidfd, Linux 5.3). Where it cannot, the scrapes show it.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable
from enum import Enum

from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.processes import Stub


class ProcessState(Enum):
    """State of a model's process.

    SUSPENDED: a signal has stopped it, and it may go on. ENDED: it was seen alive and has ended. ABSENT: there is no
    such process. UNKNOWN: this machine cannot see it.
    """

    ALIVE = "alive"
    SUSPENDED = "suspended"
    ENDED = "ended"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class ProcessTracker:
    """Identifies processes by pid and start time, so that a pid that another program reuses misleads nobody.

    One thread uses it; any thread may call `wake`. local: the server runs on this machine and its processes are visible
    here, so that a process that is not found has ended.
    """

    def __init__(self, local: bool) -> None:
        self._local = local
        self._seen: dict[int, Stub] = {}
        # By pid: a descriptor that is readable once the process has ended.
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll.register(self._wakes, select.POLLIN)

    def remember(self, pids: Iterable[int]) -> None:
        """Store these living processes, where they are visible."""
        for pid in pids:
            if pid not in self._seen and (stub := processes.stub(pid)) is not None:
                self._seen[pid] = stub
                self._watch(stub)

    def state(self, pid: int) -> ProcessState:
        """The present state of process `pid`."""
        if (seen := self._seen.get(pid)) is not None:
            return _living(pid) if processes.is_alive(seen.identity) else ProcessState.ENDED
        if processes.stub(pid) is not None:
            return _living(pid)
        return ProcessState.ABSENT if self._local else ProcessState.UNKNOWN

    def keep_only(self, pids: Iterable[int]) -> None:
        """Forget all other processes."""
        for pid in self._seen.keys() - set(pids):
            del self._seen[pid]
            self._unwatch(pid)

    def wait_ended(self, timeout_s: float) -> frozenset[int]:
        """Wait until a remembered process ends; the pids of those that another process has not replaced.

        Empty after `timeout_s` seconds, and after `wake`.
        """
        ready = {fd for fd, _ in self._poll.poll(max(timeout_s, 0.0) * 1e3)}
        ended = frozenset(pid for pid, fd in self._pidfds.items() if fd in ready)
        for pid in ended:
            self._unwatch(pid)
        # A reload starts the new process before it ends the old one.
        return frozenset(pid for pid in ended if not processes.has_successor(self._seen[pid]))

    def wake(self) -> None:
        """Let every `wait_ended` from now on return at once."""
        os.eventfd_write(self._wakes, 1)

    def _watch(self, stub: Stub) -> None:
        pid = stub.identity.pid
        # An old kernel, or no permission: the scrapes show the end.
        with contextlib.suppress(AttributeError, OSError):
            self._pidfds[pid] = os.pidfd_open(pid)
            self._poll.register(self._pidfds[pid], select.POLLIN)
            if not processes.is_alive(stub.identity):
                # The descriptor may be that of a process that has the pid since.
                self._unwatch(pid)

    def _unwatch(self, pid: int) -> None:
        if (fd := self._pidfds.pop(pid, None)) is not None:
            self._poll.unregister(fd)
            os.close(fd)


def _living(pid: int) -> ProcessState:
    return ProcessState.SUSPENDED if processes.is_suspended(pid) else ProcessState.ALIVE
