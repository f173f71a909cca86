"""The one thread that calls the model: batches in the order in which they were chosen, and new tasks between them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.serving.metrics import Counter
from shapeshift.token_adapt.adapter import Step
from shapeshift.token_adapt.interfaces import ImageModel, Probabilities
from shapeshift.token_adapt.request import now_ms

_LOOK_S = 1.0
Log = Callable[[str], None]


@dataclass(frozen=True)
class Ran:
    """A batch that has run: what came out, or why nothing did; how long it took and when it was done, ms."""

    step: Step
    results: Sequence[Probabilities]
    error: Exception | None
    took_ms: float
    done: float


class Device:
    """Runs steps; `report` is called with what became of each, on this thread."""

    def __init__(
        self, model: ImageModel, gammas: Sequence[int], report: Callable[[Ran], None], refused: Counter, log: Log
    ) -> None:
        self._model = model
        self._gammas = gammas
        self._report = report
        self._refused = refused
        self._log = log
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._look_at = time.monotonic() + _LOOK_S
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: Step) -> None:
        """Run it after those before; never blocks."""
        self._steps.put(step)

    def close(self, timeout_s: float = 10.0) -> None:
        """Run what was submitted, then end the thread."""
        self._steps.put(None)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while True:
            try:
                step = self._steps.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look_for_tasks()
                continue
            if step is None:
                return
            self._report(self._run(step))
            self._look_for_tasks()

    def _run(self, step: Step) -> Ran:
        began = now_ms()
        results: Sequence[Probabilities] = ()
        error = None
        try:
            pixels = np.stack([query.item.pixels for query in step.queries])
            tasks = np.array([query.item.request.wish.task.index for query in step.queries], dtype=np.int32)
            results = self._model.run(self._gammas[step.gamma], pixels, tasks)
        except Exception as caught:  # noqa: BLE001  an engine that fails costs its batch, not the thread
            error = caught
        done = now_ms()
        return Ran(step, results, error, done - began, done)

    def _look_for_tasks(self) -> None:
        if time.monotonic() < self._look_at:
            return
        try:
            for message in self._model.reload_tasks():
                self._refused.add()
                self._log(message)
        except Exception as error:  # noqa: BLE001  a registry must never stop what runs
            self._refused.add()
            self._log(f"the tasks could not be looked for: {error}")
        self._look_at = time.monotonic() + _LOOK_S
