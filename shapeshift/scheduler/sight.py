"""Whether the process behind a heartbeat has ended, as far as this machine can see."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from shapeshift.triton import processes
from shapeshift.triton.record import Identity


class Fate(Enum):
    """Of a process. ENDED: it was seen alive before. ABSENT: there is none of this number. UNSEEN: who knows."""

    ALIVE = "alive"
    ENDED = "ended"
    ABSENT = "absent"
    UNSEEN = "unseen"


class Sight:
    """Knows processes by number and start, so that a number that passed to another program misleads nobody.

    `local`: the server runs on this machine and outside of any container that the reader is not in, so that a
    process that cannot be found has ended.
    """

    def __init__(self, local: bool) -> None:
        self._local = local
        self._seen: dict[int, Identity] = {}

    def meet(self, beating: Iterable[int]) -> None:
        """These processes are alive: remember those that can be seen."""
        found = {pid: self._seen.get(pid) or processes.stub(pid) for pid in beating}
        self._seen |= {pid: identity for pid, identity in found.items() if identity is not None}

    def fate(self, pid: int) -> Fate:
        """What has become of process `pid`."""
        if (identity := self._seen.get(pid)) is not None:
            return Fate.ALIVE if processes.is_alive(identity) else Fate.ENDED
        if processes.stub(pid) is not None:
            return Fate.ALIVE
        return Fate.ABSENT if self._local else Fate.UNSEEN

    def forget_all_but(self, pids: Iterable[int]) -> None:
        """Only these processes are still on the page."""
        self._seen = {pid: self._seen[pid] for pid in pids if pid in self._seen}
