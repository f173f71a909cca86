"""Whether the process behind a heartbeat has ended, as far as this machine can see."""

from __future__ import annotations

from collections.abc import Iterable

from shapeshift.triton import processes
from shapeshift.triton.record import Identity


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

    def gone(self, pid: int) -> bool | None:
        """Whether process `pid` has ended; None where that cannot be seen."""
        if (identity := self._seen.get(pid)) is not None:
            return not processes.is_alive(identity)
        if processes.stub(pid) is not None:
            return False
        return True if self._local else None

    def forget_all_but(self, pids: Iterable[int]) -> None:
        """Only these processes are still on the page."""
        self._seen = {pid: self._seen[pid] for pid in pids if pid in self._seen}
