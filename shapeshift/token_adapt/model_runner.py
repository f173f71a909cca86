"""The thread that runs batches on the model. Between batches it reloads tasks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Counter
from shapeshift.token_adapt.interfaces import ImageModel, Probabilities
from shapeshift.token_adapt.policy.costs import Costs
from shapeshift.token_adapt.policy.image_scheduler import Step
from shapeshift.token_adapt.request import RequestImage, now_ms

_RELOAD_PERIOD_S = 1.0
Log = Callable[[str], None]


@dataclass(frozen=True)
class BatchResult:
    """A batch that ran. Either `probabilities`, one array per image of the step, or `error` is set."""

    step: Step[RequestImage]
    probabilities: Sequence[Probabilities]
    error: Exception | None
    took_ms: float
    ended_ms: float


class ModelRunner:
    """Runs batches in order of submission; `report` receives each result on the runner's thread."""

    def __init__(
        self,
        model: ImageModel,
        costs: Costs,
        report: Callable[[BatchResult], None],
        refused_tasks: Counter,
        log: Log,
    ) -> None:
        self._model = model
        self._gammas = costs.gammas
        self._report = report
        self._refused_tasks = refused_tasks
        self._log = log
        self._queue: queue.SimpleQueue[Step[RequestImage] | None] = queue.SimpleQueue()
        self._reloading = False
        self.steps = StepCounter("model-runner", self._has_work, costs.longest_ms / 1e3)
        self._next_reload = time.monotonic() + _RELOAD_PERIOD_S
        self._thread = threading.Thread(target=self._serve, name="model runner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, step: Step[RequestImage]) -> None:
        """Queue a batch; never blocks."""
        self._queue.put(step)

    def close(self, timeout_s: float = 10.0) -> None:
        """Run the queued batches, then end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while True:
            try:
                step = self._queue.get(timeout=_RELOAD_PERIOD_S)
            except queue.Empty:
                self._reload_tasks()
                continue
            if step is None:
                return
            with self.steps.running():
                self._report(self._run(step))
            # Versions of tasks that nobody waits for must not live through the wait.
            del step
            self._reload_tasks()

    def _has_work(self) -> bool:
        """Whether batches wait. Loading tasks may take long and is no reason to replace the process."""
        return not self._queue.empty() and not self._reloading

    def _run(self, step: Step[RequestImage]) -> BatchResult:
        started = now_ms()
        probabilities: Sequence[Probabilities] = ()
        error = None
        try:
            pixels = np.stack([image.pixels for image in step.images])
            tasks = [image.request.options.task for image in step.images]
            probabilities = self._model.run(self._gammas[step.gamma], pixels, tasks)
        except Exception as caught:  # noqa: BLE001  a failing engine fails its batch, not the thread
            error = caught
        ended = now_ms()
        return BatchResult(step, probabilities, error, ended - started, ended)

    def _reload_tasks(self) -> None:
        if time.monotonic() < self._next_reload:
            return
        self._reloading = True
        try:
            for message in self._model.reload_tasks():
                self._refused_tasks.add()
                self._log(message)
        except Exception as error:  # noqa: BLE001  a broken registry must not stop serving
            self._refused_tasks.add()
            self._log(f"reloading the tasks failed: {error}")
        finally:
            self._reloading = False
        self._next_reload = time.monotonic() + _RELOAD_PERIOD_S
