"""The health loop: once a second look at the heartbeats, and replace what is dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shapeshift.errors import ShapeshiftError
from shapeshift.scheduler import observe
from shapeshift.scheduler.actuate import Actuator
from shapeshift.scheduler.fleet import READY, Control
from shapeshift.scheduler.health import Dead, Health
from shapeshift.scheduler.journal import Journal
from shapeshift.scheduler.observe import Page
from shapeshift.scheduler.sight import Sight
from shapeshift.triton.metrics import Samples

# A front's process that has been still for so many scrapes has nothing to say about its workers.
_SPEAKS = 3
_AT_ONCE = 4


class Watch:
    """One thread calls `step`; loads run in threads of their own. `page` is the last scrape, None before the first.

    expected: models that are loaded and should have a heartbeat; any thread may set it.
    """

    def __init__(
        self,
        scrape: Callable[[], Samples],
        control: Control,
        actuator: Actuator,
        journal: Journal,
        sight: Sight,
        health: Health | None = None,
    ) -> None:
        self.page: Page | None = None
        self.expected: frozenset[str] = frozenset()
        self._scrape = scrape
        self._control = control
        self._actuator = actuator
        self._journal = journal
        self._sight = sight
        self._health = health or Health()
        self._still: dict[int, tuple[float, int]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="heal")
        self._pending: dict[str, Dead] = {}
        self._lock = threading.Lock()

    def step(self) -> None:
        """Scrape once and act on it; returns without waiting for any load."""
        try:
            page = Page(self._scrape(), time.monotonic())
        except ShapeshiftError as error:
            self._journal.say("metrics", "server", str(error))
            return
        if self._journal.forget("metrics", "server"):
            self._journal.event("metrics", "server", "answers again")
        self.page = page
        beats = page.heartbeats()
        speaking = self._count(beats)
        expected = self.expected if beats else frozenset()
        loading = self._actuator.take_touched() | self._waiting()
        dead = self._health.look(beats, self._timeouts(page, speaking), self._sight.fate, loading, expected)
        if dead:
            self._act(dead)

    def close(self) -> None:
        """Take no more loads on."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _count(self, beats: dict[str, dict[int, float]]) -> set[int]:
        """The processes whose heart beat lately; those that beat just now are looked up."""
        now = {pid: count for found in beats.values() for pid, count in found.items()}
        before = self._still
        self._still = {
            pid: (count, before[pid][1] + 1 if pid in before and before[pid][0] == count else 0)
            for pid, count in now.items()
        }
        self._sight.forget_all_but(now)
        self._sight.meet(pid for pid, (_, still) in self._still.items() if still == 0)
        return {pid for pid, (_, still) in self._still.items() if still < _SPEAKS}

    def _timeouts(self, page: Page, speaking: set[int]) -> dict[str, int]:
        found = [observe.gauge(model, observe.TIMEOUTS, page, speaking) for model in page.models]
        return {worker: int(count) for counts in found for worker, count in counts.items() if worker}

    def _waiting(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._pending)

    def _act(self, dead: dict[str, Dead]) -> None:
        try:
            loaded = {one.name for one in self._control.index() if one.state == READY}
        except ShapeshiftError as error:
            self._journal.say("health", ", ".join(sorted(dead)), f"dead, but nothing can be done: {error}")
            return
        for model, found in sorted(dead.items()):
            with self._lock:
                # Where all workers are slow at once, loading all of them would make it worse.
                slow = any(not other.certain for other in self._pending.values())
                if model not in loaded or (slow and not found.certain):
                    continue
                self._pending[model] = found
            self._threads.submit(self._heal, model, found)

    def _heal(self, model: str, found: Dead) -> None:
        try:
            self._actuator.heal(model, found.reason)
        except Exception as error:  # noqa: BLE001  one model must not end the watch over all
            self._journal.event("health", model, f"could not be loaded: {error!r}")
        finally:
            with self._lock:
                del self._pending[model]
