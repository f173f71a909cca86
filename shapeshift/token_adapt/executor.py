"""The one thread that decides, runs and records: nobody who brings images waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from shapeshift.errors import CancelledRequestError, EngineError, OverloadedError
from shapeshift.token_adapt.adapter import Query, Step, TokenAdapter
from shapeshift.token_adapt.interfaces import ImageModel, Pixels
from shapeshift.token_adapt.meters import ImageMeters
from shapeshift.token_adapt.request import EVICTED, ImageRequest, now_ms

_LOOK_S = 1.0
_GONE = CancelledRequestError("the caller cancelled the request")
Log = Callable[[str], None]


class Executor:
    """Owns the model and the adapter from `start` on."""

    def __init__(self, model: ImageModel, adapter: TokenAdapter, meters: ImageMeters, log: Log) -> None:
        self.running = 0
        self._model = model
        self._adapter = adapter
        self._meters = meters
        self._log = log
        self._inbox: queue.SimpleQueue[tuple[ImageRequest, Sequence[Pixels]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._any_cancelled = threading.Event()
        self._look_at = time.monotonic() + _LOOK_S
        self._thread = threading.Thread(target=self._serve, name="execution", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: ImageRequest, pixels: Sequence[Pixels]) -> None:
        """Let its images wait to be run; never blocks."""
        self._inbox.put((request, pixels))

    def cancel(self, request: ImageRequest) -> None:
        """Its caller has gone: what waits of it is not run."""
        request.cancelled = True
        self._any_cancelled.set()

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the running batch end, answer what waits with UNAVAILABLE, end the thread."""
        self._closing.set()
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  without this thread every caller would wait for ever
                self._log(f"images that wait are given up: {error}")
                self._give_up(EngineError(f"the execution thread failed: {error}"))
        self._take_all()
        self._give_up(OverloadedError("the model is being unloaded; retry elsewhere"))

    def _turn(self) -> None:
        self._take_in()
        self._drop_cancelled()
        self._look_for_tasks()
        step = self._adapter.step(now_ms())
        for query in step.evicted:
            self._meters.outcomes[EVICTED].add()
            query.item.request.evicted()
        if step.queries:
            self._run(step)

    def _take_in(self) -> None:
        """Batch what has arrived; without anything to do wait for it, or until tasks are to be looked for."""
        idle = not len(self._adapter)
        try:
            item = self._inbox.get(idle, _LOOK_S if idle else None)
        except queue.Empty:
            return
        if item is not None:
            self._add(*item)
        self._take_all()

    def _take_all(self) -> None:
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not None:
                self._add(*item)

    def _add(self, request: ImageRequest, pixels: Sequence[Pixels]) -> None:
        if request.cancelled:
            request.fail(_GONE)
            return
        for query in request.queries(pixels, self._adapter.costs.gammas):
            self._adapter.add(query)

    def _drop_cancelled(self) -> None:
        if self._any_cancelled.is_set():
            self._any_cancelled.clear()
            for query in self._adapter.remove(lambda query: query.item.request.cancelled):
                query.item.request.fail(_GONE)

    def _look_for_tasks(self) -> None:
        if time.monotonic() < self._look_at:
            return
        try:
            for message in self._model.reload_tasks():
                self._meters.refused_tasks.add()
                self._log(message)
        except Exception as error:  # noqa: BLE001  a registry must never stop what runs
            self._meters.refused_tasks.add()
            self._log(f"the tasks could not be looked for: {error}")
        self._look_at = time.monotonic() + _LOOK_S

    def _run(self, step: Step) -> None:
        began = now_ms()
        queries = step.queries
        gamma = self._adapter.costs.gammas[step.gamma]
        self.running = len(queries)
        try:
            pixels = np.stack([query.item.pixels for query in queries])
            tasks = np.array([query.item.request.wish.task.index for query in queries], dtype=np.int32)
            results = self._model.run(gamma, pixels, tasks)
        except Exception as error:  # noqa: BLE001  an engine that fails costs its batch, not the thread
            self._log(f"a batch of {len(queries)} images at gamma {gamma} failed: {error}")
            for query in queries:
                query.item.request.fail(EngineError(f"the engine failed: {error}"))
                self.cancel(query.item.request)
        else:
            done = now_ms()
            self._adapter.costs.observe(step.gamma, len(queries), done - began)
            for query, probabilities in zip(queries, results, strict=True):
                query.item.request.computed(query.item.index, probabilities, gamma, len(queries), done)
            self._count(queries, step, gamma, done)
        self.running = 0

    def _count(self, queries: Sequence[Query], step: Step, gamma: int, done: float) -> None:
        outcomes = [query.item.request.outcomes[query.item.index] for query in queries]
        gained = sum(query.utility * query.accuracy[step.gamma] for query in queries if done < query.deadline)
        self._meters.ran(gamma, outcomes, float(gained), step.plan_ms)

    def _give_up(self, error: Exception) -> None:
        for query in self._adapter.remove(lambda query: True):
            query.item.request.fail(error)
