"""Which workers are given rows, and which rows wait for which. Used under the router's lock only."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from shapeshift.engines.request import Row
from shapeshift.polymorph.assignment import Assignment
from shapeshift.polymorph.links import DEAD_AFTER, FAILING_AFTER, Flight, Link
from shapeshift.polymorph.waiting import WaitingRows
from shapeshift.polymorph.worker_client import State, WorkerGoneError, WorkerSickError, WrongBinError
from shapeshift.serving.log import Log

# A worker that has just said which bin it has is not asked again at once.
_SAID_S = 0.5


class Roster:
    """Lets workers join and leave, and wakes those that have something to do.

    lock: the router's; the threads that call a worker wait on its link's condition over it.
    """

    def __init__(
        self,
        lock: threading.Lock,
        workers: Sequence[str],
        assignment: Assignment,
        max_rows: int,
        max_tokens: int,
        log: Log,
    ) -> None:
        self.links = {name: Link(name, threading.Condition(lock)) for name in workers}
        self.waiting = WaitingRows(assignment, max_rows, max_tokens)
        self.retries = 0
        self._assignment = assignment
        self._log = log

    @property
    def joined(self) -> int:
        """Workers that rows are given to."""
        return sum(link.joined for link in self.links.values())

    def under_way(self) -> list[Flight]:
        """The calls that are waited for."""
        return [flight for link in self.links.values() for flight in link.under_way()]

    def outstanding(self, worker: str) -> int:
        """Rows that wait for the worker alone, and that run on it."""
        return self._assignment.outstanding(worker)

    def put(self, rows: Sequence[Row]) -> None:
        """Let `rows` wait, and wake who may take them."""
        for name in self.waiting.put(rows):
            self.links[name].wake.notify()

    def again(self, rows: Sequence[Row]) -> None:
        """Put rows that have waited or run for another worker before."""
        self.retries += len(rows)
        self.put(rows)

    def take(self, link: Link) -> list[Row]:
        """The rows of the worker's next call; none where it has not joined or should wait."""
        return self.waiting.take(link.name) if link.joined else []

    def wake_another(self) -> None:
        """Wake a worker for rows that any may take."""
        if other := self._assignment.more():
            self.links[other].wake.notify()

    def wake_all(self) -> None:
        """Wake every thread that waits to call."""
        for link in self.links.values():
            link.wake.notify_all()

    def landed(self, link: Link, flight: Flight) -> None:
        """A call has returned."""
        link.flights.remove(flight)
        if flight.given_up:
            link.lost -= 1
            return
        link.heard = time.monotonic()
        if link.joined and flight.stay == link.stay:
            self._assignment.done(link.name, len(flight.rows))

    def answered(self, link: Link, flight: Flight, state: State) -> None:
        """A call that has returned was answered, and the worker has told of itself."""
        # A call that was given up, or began before the worker joined, may be the answer of a process that has been
        # replaced.
        if flight.given_up or flight.stay != link.stay:
            return
        link.timeouts = 0
        if flight.rows:
            link.failures = 0
        self.join(link, state)

    def join(self, link: Link, state: State) -> None:
        """Take note of what a worker says of itself, and give it rows if they can be for it."""
        known, link.state = link.state, state
        changed = known is None or known.bin != state.bin
        if link.joined and not changed:
            return
        self.leave(link, f"has bin {state.bin} now")
        if not self.waiting.add(link.name, state.bin):
            if changed:
                self._log(f"{link.name}: not used, its bin {state.bin or 'any'} is none of this model's")
            return
        link.joined = True
        link.stay += 1
        link.since = time.monotonic()
        self._log(f"{link.name}: joined, bin {state.bin or 'any'}, generation {state.generation}")
        for name in self.waiting.house():
            self.links[name].wake.notify()
        link.wake.notify_all()

    def leave(self, link: Link, why: str) -> None:
        """Give a worker no further rows, and those that waited for it to others."""
        if not link.joined:
            return
        link.joined = False
        self._log(f"{link.name}: left, it {why}")
        self.again(self.waiting.remove(link.name))
        # It may have been woken for a row that another has to take now.
        self.wake_another()

    def distrust(self, link: Link, error: Exception, had_rows: bool) -> None:
        """A call to a worker has failed."""
        if isinstance(error, WorkerGoneError):
            self.leave(link, "is not ready")
        elif isinstance(error, WorkerSickError):
            link.timeouts = max(link.timeouts, DEAD_AFTER)
            self.leave(link, "has died")
        elif isinstance(error, WrongBinError):
            self.leave(link, "has another bin")
            if time.monotonic() - link.since > _SAID_S:
                link.hello = True
                link.wake.notify()
        elif had_rows:
            # One that fails at once would otherwise be the first to be free, and draw every text.
            link.failures += 1
            if link.failures >= FAILING_AFTER:
                self.leave(link, f"failed {link.failures} times in a row: {error}")
