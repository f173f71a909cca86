"""The service of the current candidate; it is replaced while it serves when the registry names another candidate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shapeshift.cascade.candidates import registry
from shapeshift.cascade.candidates.registry import ServingCandidate
from shapeshift.cascade.level_client import LevelClient, LevelGoneError
from shapeshift.cascade.metrics import CascadeMetrics
from shapeshift.cascade.policy.selection import choose
from shapeshift.cascade.request import ClassifyRequest
from shapeshift.cascade.service import CascadeService
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.registry import FILE, FolderWatch
from shapeshift.serving.model_args import Log

_CHECK_S = 1.0
_PROBE_S = 0.2
_READY_TIMEOUT_S = 60.0


class HotSwap:
    """Checks the registry once a second; a new candidate serves as soon as all its later levels answer.

    open_service(serving) makes the service of a candidate. Where it raises, or the registry is broken, the current
    candidate keeps serving; a metric and the log report the error.
    """

    def __init__(
        self,
        folder: Path,
        own: CascadeSettings,
        open_service: Callable[[ServingCandidate], CascadeService],
        client: LevelClient,
        metrics: CascadeMetrics,
        log: Log,
        ready_timeout_s: float = _READY_TIMEOUT_S,
    ) -> None:
        self._folder = folder
        self._own = own
        self._open = open_service
        self._client = client
        self._metrics = metrics
        self._log = log
        self._ready_timeout_s = ready_timeout_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._watch = FolderWatch(folder / FILE)
        # The state that is read next is not a change.
        self._watch.has_changed()
        serving = self._find()
        self._state = (serving.candidate, serving.table)
        # The first service does not wait for its later levels: the first level can answer without them.
        self.current = open_service(serving)
        metrics.set_candidate(serving.candidate)
        self._thread = threading.Thread(target=self._run, name="candidates", daemon=True)
        self._thread.start()

    def submit(self, request: ClassifyRequest) -> list[int]:
        """Start a request on the current service; see `CascadeService.submit`."""
        with self._lock:
            service = self.current
            service.acquire()
        return service.submit(request)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop checking, and close the current service."""
        self._stop.set()
        self._thread.join(timeout_s)
        self.current.close()

    def _run(self) -> None:
        while not self._stop.wait(_CHECK_S):
            if self._watch.has_changed():
                try:
                    self._swap()
                except Exception as error:  # noqa: BLE001  the current candidate keeps serving
                    self._metrics.count_failed_swap()
                    name = self.current.candidate.name
                    self._log(f"{self._folder}: the change is not applied, candidate {name} keeps serving: {error}")

    def _swap(self) -> None:
        serving = self._find()
        if (serving.candidate, serving.table) == self._state:
            return
        for model in serving.candidate.levels[1:]:
            self._wait_ready(model, serving.table.pairs)
        if self._stop.is_set():
            return
        service = self._open(serving)
        with self._lock:
            stopped = self._stop.is_set()
            before, self.current = (service, self.current) if stopped else (self.current, service)
        if stopped:
            before.close()
            return
        self._state = (serving.candidate, serving.table)
        self._metrics.set_candidate(serving.candidate)
        self._log(f"candidate {serving.candidate.name} serves task {self._own.task}")
        before.close()

    def _find(self) -> ServingCandidate:
        """The candidate that the registry names; if it pins none and the settings state targets, the one that fits."""
        own = self._own
        found = registry.serving(self._folder, own.task)
        if found.pinned or not (own.min_accuracy or own.max_latency_ms):
            return found
        choice = choose(found.table.candidates, own.min_accuracy, own.max_latency_ms)
        if choice.selected is None:
            best = choice.nearest
            self._log(f"no candidate of task {own.task} meets min_accuracy and max_latency_ms; the best is {best.name}")
        return replace(found, candidate=choice.serving)

    def _wait_ready(self, model: str, pairs: bool) -> None:
        end = time.monotonic() + self._ready_timeout_s
        while not self._stop.is_set() and not self._client.is_ready(model, pairs):
            if time.monotonic() > end:
                raise LevelGoneError(f"model {model} was not ready within {self._ready_timeout_s:g} s")
            self._stop.wait(_PROBE_S)
