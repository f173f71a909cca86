"""The health loop: every second it reads the heartbeats and reloads dead models; between, it waits for deaths."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.health import DeadModel, HealthTracker
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage, listed, timeouts_in_a_row
from shapeshift.sidecar.servers import Changes
from shapeshift.sidecar.watch_all import WatchAll
from shapeshift.triton.embedded.process_tracker import ProcessState, ProcessTracker
from shapeshift.triton.metrics import Heartbeats
from shapeshift.triton.names import split

V = TypeVar("V")

_CONCURRENT_LOADS = 4
_OWED = DeadModel("unloaded when its process died, and not loaded again", True)


class HealthLoop:
    """One thread calls `step` and `wait` in turn; loads run in their own threads.

    page: the last scrape, None before the first.

    expected: models that are loaded and should have a heartbeat; any thread may set it. slow_reload_s: after so long a
    reload of a slow model holds up no other. others: judges the models without a heartbeat; None: nothing does.
    """

    def __init__(
        self,
        scrape: Callable[[], MetricsPage],
        control: Changes,
        actuator: Actuator,
        journal: Journal,
        processes: ProcessTracker,
        slow_reload_s: float = 10.0,
        others: WatchAll | None = None,
    ) -> None:
        self.page: MetricsPage | None = None
        self.expected: frozenset[str] = frozenset()
        self._scrape = scrape
        self._control = control
        self._actuator = actuator
        self._journal = journal
        self._processes = processes
        self._slow_reload_s = slow_reload_s
        self._others = others
        # By node: only what a node reports now is judged.
        self._health: dict[str, HealthTracker] = {}
        # Models of nodes that have not answered since these were changed.
        self._changed: frozenset[str] = frozenset()
        self._heartbeats = Heartbeats[int]()
        # By node, so that loads that hang on one hold up no other.
        self._threads: dict[str, ThreadPoolExecutor] = {}
        # By model: why it is reloaded, and since when, in monotonic seconds.
        self._reloads: dict[str, tuple[DeadModel, float]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def pending(self) -> frozenset[str]:
        """The models that are being reloaded, or wait for it."""
        with self._lock:
            return frozenset(self._reloads)

    def step(self) -> None:
        """Scrape once and start the loads that are due. Does not wait for the loads."""
        try:
            page = self._scrape()
        except ShapeshiftError as error:
            self._journal.log_once("metrics", "server", str(error), logging.WARNING)
            return
        if self._journal.clear("metrics", "server"):
            self._journal.log("metrics", "server", "answers again")
        self.page = page
        heartbeats = page.heartbeats()
        timed_out = timeouts_in_a_row(page, self._living(heartbeats))
        self._changed |= self._actuator.take_changed()
        own_heartbeats, own_timeouts, own_stalled = _by_node(heartbeats), _by_node(timed_out), _by_node(page.stalled())
        changing = self._changed | self.pending
        loading = _by_node(dict.fromkeys(changing, True))
        expected = _by_node(dict.fromkeys(self.expected, True))
        dead: dict[str, DeadModel] = {}
        for node in page.nodes:
            dead |= self._health.setdefault(node, HealthTracker()).update(
                own_heartbeats.get(node, {}),
                own_timeouts.get(node, {}),
                self._processes.state,
                loading.get(node, ()),
                expected.get(node, ()) if node in own_heartbeats else (),
                own_stalled.get(node, {}),
            )
        if self._others is not None:
            dead |= self._others.dead(page, changing)
        self._changed = frozenset(model for model in self._changed if split(model)[0] not in page.nodes)
        owed = {name: _OWED for name in self._actuator.owed.names() if split(name)[0] in page.nodes}
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
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _living(self, heartbeats: dict[str, dict[int, float]]) -> frozenset[int]:
        now = {pid: count for counts in heartbeats.values() for pid, count in counts.items()}
        living = self._heartbeats.living(now)
        self._processes.keep_only(now)
        self._processes.remember(living)
        return living

    def _reload_ended(self, ended: frozenset[int]) -> None:
        heartbeats = self.page.heartbeats() if self.page is not None else {}
        busy = self._actuator.changing | self.pending
        dead = {
            model: DeadModel(f"{listed(sorted(pids))} has ended", True, ended=self._have_all_ended(counts))
            for model, counts in heartbeats.items()
            if (pids := ended & counts.keys()) and model not in busy
        }
        if dead:
            self._reload_all(dead)

    def _have_all_ended(self, pids: Iterable[int]) -> bool:
        return all(self._processes.state(pid) in (ProcessState.ENDED, ProcessState.ABSENT) for pid in pids)

    def _reload_all(self, dead: dict[str, DeadModel]) -> None:
        try:
            loaded = self._control.ready(dead)
        except ShapeshiftError as error:
            text = f"dead, but it cannot be reloaded: {error}"
            self._journal.log_once("health", ", ".join(sorted(dead)), text, logging.ERROR)
            return
        for name, verdict in sorted(dead.items()):
            with self._lock:
                if verdict is _OWED and name in loaded:
                    self._actuator.owed.remove(name)
                    continue
                can_load = name in loaded or name in self._actuator.owed.names()
                # If all workers are slow at once, reloading all of them would make it worse: one at a time. But a
                # reload that hangs must not keep the others from being healed.
                since = time.monotonic() - self._slow_reload_s
                slow = any(not other.certain and began > since for other, began in self._reloads.values())
                if name in self._reloads or not can_load or (slow and not verdict.certain):
                    continue
                self._reloads[name] = verdict, time.monotonic()
            self._threads_of(name).submit(self._reload, name, verdict)

    def _threads_of(self, model: str) -> ThreadPoolExecutor:
        node, _ = split(model)
        return self._threads.setdefault(node, ThreadPoolExecutor(_CONCURRENT_LOADS, thread_name_prefix="reload"))

    def _reload(self, name: str, verdict: DeadModel) -> None:
        try:
            self._actuator.reload(name, verdict)
        except Exception as error:  # noqa: BLE001  a failure with one model must not stop the loop for all
            self._journal.log("health", name, f"could not be reloaded: {error!r}", logging.ERROR)
        finally:
            with self._lock:
                del self._reloads[name]


def _by_node(values: Mapping[str, V]) -> dict[str, dict[str, V]]:
    """What belongs to the models of each node."""
    by_node: dict[str, dict[str, V]] = {}
    for model, value in values.items():
        by_node.setdefault(split(model)[0], {})[model] = value
    return by_node
