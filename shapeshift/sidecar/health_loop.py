"""The health loop: every second it reads the heartbeats and reloads dead models; between, it waits for deaths."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar import observe
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.health import DeadModel, HealthTracker
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.process_tracker import ProcessState, ProcessTracker
from shapeshift.sidecar.workers import READY, Control
from shapeshift.triton.metrics import Samples

# A front process whose heartbeat stood still for this many scrapes exports stale gauges about its workers.
_STALE_SCRAPES = 3
_CONCURRENT_LOADS = 4
_SLOW_RELOAD_S = 10.0
_OWED = DeadModel("unloaded when its process died, and not loaded again", True)


class HealthLoop:
    """One thread calls `step` and `wait` in turn; loads run in their own threads.

    page: the last scrape, None before the first.

    expected: models that are loaded and should have a heartbeat; any thread may set it.
    """

    def __init__(
        self,
        scrape: Callable[[], Samples],
        control: Control,
        actuator: Actuator,
        journal: Journal,
        processes: ProcessTracker,
        health: HealthTracker | None = None,
    ) -> None:
        self.page: MetricsPage | None = None
        self.expected: frozenset[str] = frozenset()
        self._scrape = scrape
        self._control = control
        self._actuator = actuator
        self._journal = journal
        self._processes = processes
        self._health = health or HealthTracker()
        # By pid: the last heartbeat, and for how many scrapes it has not changed.
        self._unchanged: dict[int, tuple[float, int]] = {}
        self._threads = ThreadPoolExecutor(_CONCURRENT_LOADS, thread_name_prefix="reload")
        # By model: why it is reloaded, and since when, in monotonic seconds.
        self._pending: dict[str, tuple[DeadModel, float]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def step(self) -> None:
        """Scrape once and start the loads that are due. Does not wait for the loads."""
        try:
            page = MetricsPage(self._scrape(), time.monotonic())
        except ShapeshiftError as error:
            self._journal.log_once("metrics", "server", str(error))
            return
        if self._journal.clear("metrics", "server"):
            self._journal.log("metrics", "server", "answers again")
        self.page = page
        heartbeats = page.heartbeats()
        fresh = self._fresh_pids(heartbeats)
        expected = self.expected if heartbeats else frozenset()
        loading = self._actuator.take_changed() | self._pending_models()
        dead = self._health.update(
            heartbeats, self._timeouts(page, fresh), self._processes.state, loading, expected, page.stalled()
        )
        owed = dict.fromkeys(self._actuator.owed.names(), _OWED)
        if dead or owed:
            self._reload_all({**owed, **dead})

    def wait(self, seconds: float) -> None:
        """Wait for the next step. A model whose process ends meanwhile is reloaded at once."""
        end = time.monotonic() + seconds
        while not self._closed.is_set() and (left := end - time.monotonic()) > 0:
            if ended := self._processes.wait_ended(left):
                self._reload_ended(ended)

    def close(self) -> None:
        """Start no more loads, and end `wait`."""
        self._closed.set()
        self._processes.wake()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fresh_pids(self, heartbeats: dict[str, dict[int, float]]) -> set[int]:
        """The processes whose heartbeat moved recently."""
        now = {pid: count for counts in heartbeats.values() for pid, count in counts.items()}
        before = self._unchanged
        self._unchanged = {
            pid: (count, before[pid][1] + 1 if pid in before and before[pid][0] == count else 0)
            for pid, count in now.items()
        }
        self._processes.keep_only(now)
        self._processes.remember(pid for pid, (_, unchanged) in self._unchanged.items() if unchanged == 0)
        return {pid for pid, (_, unchanged) in self._unchanged.items() if unchanged < _STALE_SCRAPES}

    def _reload_ended(self, ended: frozenset[int]) -> None:
        heartbeats = self.page.heartbeats() if self.page is not None else {}
        busy = self._actuator.changing | self._pending_models()
        dead = {
            model: DeadModel(
                f"process {', '.join(map(str, sorted(pids)))} has ended", True, ended=self._have_all_ended(counts)
            )
            for model, counts in heartbeats.items()
            if (pids := ended & counts.keys()) and model not in busy
        }
        if dead:
            self._reload_all(dead)

    def _have_all_ended(self, pids: Iterable[int]) -> bool:
        return all(self._processes.state(pid) in (ProcessState.ENDED, ProcessState.ABSENT) for pid in pids)

    def _timeouts(self, page: MetricsPage, fresh: set[int]) -> dict[str, int]:
        found = [observe.gauge(model, observe.TIMEOUTS, page, fresh) for model in page.models]
        return {worker: int(count) for counts in found for worker, count in counts.items() if worker}

    def _pending_models(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._pending)

    def _reload_all(self, dead: dict[str, DeadModel]) -> None:
        try:
            loaded = {model.name for model in self._control.index() if model.state == READY}
        except ShapeshiftError as error:
            self._journal.log_once("health", ", ".join(sorted(dead)), f"dead, but it cannot be reloaded: {error}")
            return
        for name, found in sorted(dead.items()):
            with self._lock:
                if found is _OWED and name in loaded:
                    self._actuator.owed.remove(name)
                    continue
                known = name in loaded or name in self._actuator.owed.names()
                # If all workers are slow at once, reloading all of them would make it worse: one at a time. But a
                # reload that hangs must not keep the others from being healed.
                since = time.monotonic() - _SLOW_RELOAD_S
                slow = any(not other.certain and began > since for other, began in self._pending.values())
                if name in self._pending or not known or (slow and not found.certain):
                    continue
                self._pending[name] = found, time.monotonic()
            self._threads.submit(self._reload, name, found)

    def _reload(self, name: str, found: DeadModel) -> None:
        try:
            self._actuator.reload(name, found.reason, found.hung, found.ended)
        except Exception as error:  # noqa: BLE001  a failure with one model must not stop the loop for all
            self._journal.log("health", name, f"could not be reloaded: {error!r}")
        finally:
            with self._lock:
                del self._pending[name]
