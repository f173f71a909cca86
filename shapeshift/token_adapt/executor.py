"""The thread that decides what runs next and records what ran. Neither clients nor the device wait for it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import Logger
from typing import Protocol

import numpy as np

from shapeshift.errors import CancelledRequestError, EngineError
from shapeshift.serving import events
from shapeshift.serving.bounds import unloading
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Counter, Histogram
from shapeshift.token_adapt.model.manifest import Preprocessing
from shapeshift.token_adapt.policy.costs import Costs, GammaProfile
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler, Step, Timetable
from shapeshift.token_adapt.request import (
    EVICTED,
    IN_TIME,
    OUTCOMES,
    ImageRequest,
    Pixels,
    RequestImage,
    Task,
    Values,
    now_ms,
)

_RELOAD_PERIOD_S = 1.0
_CANCELLED = CancelledRequestError("the caller cancelled the request")
_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
_PLAN_MS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50)

# None: the images are not decoded, as they are too late or cancelled.
Arrival = tuple[ImageRequest, Sequence[Pixels] | None]


class ImageModel(Protocol):
    """A vision transformer that can add tokens (gamma > 0) or merge them (gamma < 0).

    gammas: ascending; 0 is one of them. One thread calls `run` and `reload_tasks`. `tasks` is only replaced as a whole,
    so any thread can read it.
    """

    preprocessing: Preprocessing
    gammas: tuple[int, ...]
    profiles: Mapping[int, GammaProfile]
    tasks: Mapping[str, Task]

    def run(self, gamma: int, pixels: Pixels, tasks: Sequence[Task]) -> Sequence[Values]:
        """n arrays: class probabilities, one value per label of the image's task; or the vector of the image.

        pixels [n, size, size, 3], as `preprocessing` makes them; tasks [n], of this model, served still or not. n can
        exceed the largest profiled batch.
        """
        ...

    def reload_tasks(self) -> list[str]:
        """Update `tasks` from the task registry; returns one message per refused entry."""
        ...


class ImageMetrics:
    """Written by the executor's thread only, except `refused_tasks`, which the model runner writes."""

    def __init__(self, gammas: Sequence[int]) -> None:
        self.outcomes = {
            outcome: Counter("images_total", "Settled images, by outcome", {"outcome": outcome}) for outcome in OUTCOMES
        }
        self.by_gamma = {
            gamma: Counter("gamma_images_total", "Images run, by gamma", {"gamma": str(gamma)}) for gamma in gammas
        }
        self.batch_images = Histogram("batch_images", "Batches run, by number of images", _BATCH_SIZES)
        self.plan_ms = Histogram("plan_ms", "Plans made, by planning time", _PLAN_MS)
        self.utility = Counter(
            "utility_total", "Utility of images of requests in time, times the accuracy of their gamma"
        )
        self.refused_tasks = Counter("tasks_refused_total", "Refused entries of the task registry")

    @property
    def exported(self) -> list[Counter | Histogram]:
        single = self.utility, self.refused_tasks, self.batch_images, self.plan_ms
        return [*self.outcomes.values(), *self.by_gamma.values(), *single]

    def record_batch(self, gamma: int, outcomes: Sequence[str], plan_ms: float) -> None:
        """Count a batch that ran; `outcomes` has one entry per image."""
        for outcome in outcomes:
            self.outcomes[outcome].add()
        self.by_gamma[gamma].add(len(outcomes))
        self.batch_images.observe(len(outcomes))
        self.plan_ms.observe(plan_ms)


@dataclass(frozen=True)
class BatchResult:
    """A batch that ran. Either `values`, one array per image of the step, or `error` is set."""

    step: Step[RequestImage]
    values: Sequence[Values]
    error: Exception | None
    took_ms: float
    ended_ms: float


class ModelRunner:
    """The thread that runs batches, in order of submission, and between them reloads the tasks; `report` gets results.

    It is the only one that uses the model.
    """

    def __init__(
        self, model: ImageModel, costs: Costs, report: Callable[[BatchResult], None], refused: Counter, log: Logger
    ) -> None:
        self._model = model
        self._gammas = costs.gammas
        self._report = report
        self._refused_tasks = refused
        self._log = log
        self._queue: queue.SimpleQueue[Step[RequestImage] | None] = queue.SimpleQueue()
        self._reloading = False
        self.steps = StepCounter("model-runner", self._has_work, costs.longest_ms / 1e3)
        self.submit = self._queue.put
        self._next_reload = time.monotonic() + _RELOAD_PERIOD_S
        self._thread = threading.Thread(target=self._serve, name="model runner", daemon=True)
        self.start = self._thread.start

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
        values: Sequence[Values] = ()
        error = None
        try:
            pixels = np.stack([image.pixels for image in step.images])
            tasks = [image.request.options.task for image in step.images]
            values = self._model.run(self._gammas[step.gamma], pixels, tasks)
        except Exception as caught:  # noqa: BLE001  a failing engine fails its batch, not the thread
            error = caught
        ended = now_ms()
        return BatchResult(step, values, error, ended - started, ended)

    def _reload_tasks(self) -> None:
        if time.monotonic() < self._next_reload:
            return
        self._reloading = True
        try:
            for message in self._model.reload_tasks():
                self._refused_tasks.add()
                self._log.warning(message)
        except Exception as error:  # noqa: BLE001  a broken registry must not stop serving
            self._refused_tasks.add()
            self._log.error(f"reloading the tasks failed: {error}")
        finally:
            self._reloading = False
        self._next_reload = time.monotonic() + _RELOAD_PERIOD_S


class Executor:
    """Owns the scheduler after `start`, and the thread of the model runner.

    The next batch is chosen shortly before the predicted end of the running one: late arrivals still count, and the
    device does not idle. While a batch overruns its prediction, nothing is chosen.
    """

    def __init__(self, model: ImageModel, scheduler: ImageScheduler[RequestImage], log: Logger) -> None:
        self.num_running = 0
        self._scheduler = scheduler
        self.metrics = ImageMetrics(scheduler.costs.gammas)
        self._log = log
        # None wakes the thread.
        self._events: queue.SimpleQueue[Arrival | BatchResult | None] = queue.SimpleQueue()
        self._runner = ModelRunner(model, scheduler.costs, self._events.put, self.metrics.refused_tasks, log)
        self.steps = [StepCounter("executor", self._has_work), self._runner.steps]
        self._closing = threading.Event()
        self._any_cancelled = threading.Event()
        self._timetable = Timetable()
        self._thread = threading.Thread(target=self._serve, name="executor", daemon=True)

    def start(self) -> None:
        self._runner.start()
        self._thread.start()

    def submit(self, request: ImageRequest, pixels: Sequence[Pixels] | None) -> None:
        """Queue the images of a request; None: settle it, since it is cancelled or too late. Never blocks."""
        self._events.put((request, pixels))

    @property
    def usual_ms(self) -> float:
        """The time from submission to the answer while batches are full: of the running one, and of the next."""
        return 2 * self._scheduler.costs.min_time(self._scheduler.costs.max_size) + self._scheduler.settings.margin_ms

    def can_meet(self, deadline: float) -> bool:
        """Whether an image that is submitted now, and runs at once and alone, is answered before `deadline` (ms)."""
        return now_ms() + self._scheduler.costs.min_time(1) + self._scheduler.settings.margin_ms < deadline

    def cancel(self, request: ImageRequest) -> None:
        """Do not run the images of the request that are not in flight."""
        request.cancelled = True
        self._any_cancelled.set()

    def close(self, timeout_s: float = 15.0) -> None:
        """Finish the batches in flight, fail waiting requests with UNAVAILABLE, end the threads."""
        self._closing.set()
        self._events.put(None)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self._step()
                self.steps[0].step()
            except Exception as error:  # noqa: BLE001  without this thread no request would end
                self._log.error(f"the execution thread failed, and with it all waiting images: {error}")
                self._fail_waiting(EngineError(f"the execution thread failed: {error}"))
        self._runner.close()
        for event in self._queued_events():
            self._record(event)
        self._fail_waiting(unloading())

    def _step(self) -> None:
        """Record arrivals and results, decide the next batch, run it."""
        for event in self._next_events():
            self._record(event)
        self._drop_cancelled()
        if self._seconds_to_decision() == 0 and not self._closing.is_set():
            began = now_ms()
            start = self._timetable.free_from(began)
            step = self._scheduler.step(start)
            with self._failing(image.request for image in (*step.evicted, *step.images)):
                self._settle_evicted(step, start)
                self._run(step, start)
            if step.evicted:
                self._record_images("dropped", step.evicted, now_ms(), 0.0)
            self._timetable.decided(now_ms() - began)

    def _has_work(self) -> bool:
        """Whether the thread has something to do now: while a batch runs, waiting images are not."""
        return not self._events.empty() or (len(self._scheduler) > 0 and self._timetable.is_idle)

    # Decide and run.

    def _seconds_to_decision(self) -> float | None:
        """Seconds until a batch is chosen if no event comes; None: only an event leads to a decision."""
        wait_ms = self._timetable.decision_ms(now_ms()) if len(self._scheduler) else None
        return None if wait_ms is None else wait_ms / 1e3

    def _settle_evicted(self, step: Step[RequestImage], now: float) -> None:
        for image in step.evicted:
            self._evict(image.request, 1)
        self._count_utility({image.request for image in step.evicted}, now)

    def _evict(self, request: ImageRequest, num_images: int) -> None:
        self.metrics.outcomes[EVICTED].add(num_images)
        request.record_evictions(num_images)

    def _run(self, step: Step[RequestImage], start: float) -> None:
        if not step.images:
            return
        self._timetable.add(start, float(self._scheduler.costs.times([len(step.images)])[0, step.gamma]))
        self.num_running += len(step.images)
        self._runner.submit(step)

    # Record.

    def _next_events(self) -> Iterator[Arrival | BatchResult | None]:
        """Arrivals and results in order; waits for the first one until the next decision."""
        timeout_s = self._seconds_to_decision()
        try:
            event = self._events.get(timeout_s != 0, timeout_s or None)
        except queue.Empty:
            return
        yield event
        yield from self._queued_events()

    def _queued_events(self) -> Iterator[Arrival | BatchResult | None]:
        while not self._events.empty():
            yield self._events.get()

    def _record(self, event: Arrival | BatchResult | None) -> None:
        if isinstance(event, BatchResult):
            with self._failing(image.request for image in event.step.images):
                self._record_result(event)
            if event.error is None:
                gamma = self._scheduler.costs.gammas[event.step.gamma]
                self._record_images("batch", event.step.images, event.ended_ms, event.took_ms, gamma=gamma)
        elif event is not None:
            with self._failing([event[0]]):
                self._record_arrival(*event)

    def _record_arrival(self, request: ImageRequest, pixels: Sequence[Pixels] | None) -> None:
        if request.cancelled:
            request.fail(_CANCELLED)
            return
        if pixels is None:
            self._evict(request, request.num_images)
            return
        for image in request.waiting_images(pixels, self._scheduler.costs.gammas):
            self._scheduler.add(image)

    def _record_result(self, result: BatchResult) -> None:
        images, gamma_index = result.step.images, result.step.gamma
        gamma = self._scheduler.costs.gammas[gamma_index]
        self._timetable.end(result.ended_ms)
        self.num_running -= len(images)
        if result.error is not None:
            self._log.error(f"a batch of {len(images)} images at gamma {gamma} failed: {result.error}")
            for image in images:
                image.request.fail(EngineError(f"the engine failed: {result.error}"))
                self.cancel(image.request)
            return
        predicted_ms = float(self._scheduler.costs.times([len(images)])[0, gamma_index])
        for request in {image.request for image in images}:
            request.trace_batch(gamma, len(images), predicted_ms, result.took_ms, result.ended_ms)
        self._scheduler.costs.observe(gamma_index, len(images), result.took_ms)
        for image, values in zip(images, result.values, strict=True):
            image.request.compute_ms = max(image.request.compute_ms, result.took_ms)
            image.request.record_result(image.index, values, gamma, len(images), result.ended_ms)
            image.request.utility += float(image.expected_utility[gamma_index])
        outcomes = [image.request.outcomes[image.index] for image in images]
        self.metrics.record_batch(gamma, outcomes, result.step.plan_ms)
        self._count_utility({image.request for image in images}, result.ended_ms)

    def _record_images(self, kind: str, images: Sequence[RequestImage], now: float, took_ms: float, **of: int) -> None:
        """Record a batch that has ended, or images that were dropped.

        With what they earn in time at each gamma, and the device time of one image there.
        """
        if not events.is_recording():
            return
        costs = self._scheduler.costs
        by_gamma = np.sum([image.expected_utility for image in images], axis=0)
        events.record(
            kind,
            images=len(images),
            in_time=sum(image.request.outcomes[image.index] == IN_TIME for image in images),
            **of,
            ms=round(took_ms, 1),
            waited=round(now - took_ms - max(image.arrival for image in images), 1),
            slack=round(min(image.deadline for image in images) - now, 1),
            earns=np.round(by_gamma, 2).tolist(),
            costs=np.round(costs.times([costs.max_size])[0] / costs.max_size, 3).tolist(),
        )

    def _count_utility(self, requests: Iterable[ImageRequest], now: float) -> None:
        """Count what requests, of which images were settled just now, have gained by ending in time."""
        for request in requests:
            if request.is_finished and not request.error and not request.cancelled and now < request.deadline:
                self.metrics.utility.add(request.utility)

    def _drop_cancelled(self) -> None:
        if self._any_cancelled.is_set():
            self._any_cancelled.clear()
            for image in self._scheduler.remove(lambda image: image.request.cancelled):
                image.request.fail(_CANCELLED)

    @contextlib.contextmanager
    def _failing(self, requests: Iterable[ImageRequest]) -> Iterator[None]:
        """Where the block raises, these requests fail: none may stay unanswered, and the thread goes on."""
        affected = set(requests)
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._log.error(f"{len(affected)} requests fail, as the execution thread did: {error}")
            for request in affected:
                request.fail(EngineError(f"the execution thread failed: {error}"))
                self.cancel(request)

    def _fail_waiting(self, error: Exception) -> None:
        for image in self._scheduler.remove(lambda image: True):
            image.request.fail(error)
