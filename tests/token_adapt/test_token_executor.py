"""The executor's decisions and records on a clock of the test, without its threads."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from shapeshift.errors import EngineError
from shapeshift.token_adapt import executor as executor_module
from shapeshift.token_adapt import model_runner
from shapeshift.token_adapt import request as request_module
from shapeshift.token_adapt.executor import Executor, ImageMetrics
from shapeshift.token_adapt.interfaces import Task
from shapeshift.token_adapt.model_runner import BatchResult, ModelRunner
from shapeshift.token_adapt.policy import image_scheduler
from shapeshift.token_adapt.policy.costs import Costs
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler, SchedulerSettings, Step
from shapeshift.token_adapt.request import ImageRequest, ImageRequestOptions, RequestImage
from tests.token_adapt.token_models import SIZE, TASKS, RecordingModel


class Desk:
    """An executor whose threads do not run, and requests that arrived at 1,000 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (executor_module, request_module):
            monkeypatch.setattr(module, "now_ms", lambda: self.now)
        model = RecordingModel()
        costs = Costs(model.profiles, model.gammas, 64)
        scheduler: ImageScheduler[RequestImage] = ImageScheduler(costs, SchedulerSettings(margin_ms=3.0), self.now)
        self.lines: list[str] = []
        self.executor = Executor(model, scheduler, self.lines.append)
        self.metrics = self.executor.metrics
        self.finished: list[ImageRequest] = []

    def images(self, count: int, latency_ms: float = 100.0, task: Task = TASKS["animals"]) -> list[RequestImage]:
        """The images of one request."""
        request = ImageRequest(ImageRequestOptions(task, latency_ms, 1.0), count, self.finished.append)
        pixels = [np.zeros((SIZE, SIZE, 3), np.uint8)] * count
        return request.waiting_images(pixels, self.executor._scheduler.costs.gammas)

    def end(self, images: Sequence[RequestImage], ended_ms: float, gamma: int = 1) -> None:
        """Record that a batch of these images ended; gamma: its index."""
        self.executor._in_flight.append(1.0)
        self.executor.num_running += len(images)
        probabilities = [np.eye(1, len(image.request.options.task.labels), dtype=np.float32)[0] for image in images]
        self.executor._record(BatchResult(Step(images, gamma, ()), probabilities, None, 1.0, ended_ms))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_a_decision_comes_shortly_before_the_running_batch_ends(desk: Desk) -> None:
    """In seconds, as the queue of events waits."""
    executor = desk.executor
    assert executor._seconds_to_decision() is None
    for image in desk.images(1):
        executor._scheduler.add(image)
    assert executor._seconds_to_decision() == 0.0
    executor._in_flight.append(500.0)
    executor._free_at = 1500.0
    assert executor._seconds_to_decision() == pytest.approx(0.499)
    desk.now = 1499.5
    assert executor._seconds_to_decision() == 0.0
    desk.now = 1500.0
    assert executor._seconds_to_decision() is None


def test_the_end_of_a_batch_is_predicted_and_corrected(desk: Desk) -> None:
    """In milliseconds: by the profile, and from the instant at which the batch before it really ended."""
    executor = desk.executor
    costs = executor._scheduler.costs
    steps = [Step(desk.images(count), 1, ()) for count in (2, 1)]
    predicted = [float(costs.times([count])[0, 1]) for count in (2, 1)]
    executor._run(steps[0], 1000.0)
    assert executor._free_at == pytest.approx(1000.0 + predicted[0])
    executor._run(steps[1], executor._free_at)
    assert executor._free_at == pytest.approx(1000.0 + sum(predicted)) and executor.num_running == 3
    executor._record(BatchResult(steps[0], [np.ones(2, np.float32)] * 2, None, 7.0, 1007.0))
    assert executor._free_at == pytest.approx(1007.0 + predicted[1]) and executor.num_running == 1


def test_a_decision_begins_earlier_where_decisions_take_long(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = desk.executor
    decide = executor._scheduler.step

    def take_4_ms(now: float) -> Step[RequestImage]:
        desk.now += 4.0
        return decide(now)

    monkeypatch.setattr(executor._scheduler, "step", take_4_ms)
    for image in desk.images(1):
        executor._scheduler.add(image)
    executor._step()
    # A tenth of the way from 1 ms to twice the time and 1 ms.
    assert executor._lead_ms == pytest.approx(1.0 + 0.1 * (2 * 4.0 + 1.0 - 1.0))
    for _ in range(100):
        executor._adapt_lead(50.0)
    assert executor._lead_ms == 20.0


def test_what_a_deadline_needs(desk: Desk) -> None:
    """The time of one image, or of two full batches, and the margin."""
    executor = desk.executor
    costs, most = executor._scheduler.costs, executor._scheduler.costs.max_size
    alone = costs.min_time(1) + 3.0
    assert executor.can_meet(1000.01 + alone) and not executor.can_meet(1000.0 + alone)
    assert executor.usual_ms == pytest.approx(2 * costs.min_time(most) + 3.0)


def test_utility_counts_for_requests_that_end_in_time(desk: Desk) -> None:
    first, second = desk.images(2)
    desk.end([first], 1050.0)
    assert desk.metrics.utility.value == 0
    desk.end([second], 1099.0)
    assert desk.finished == [first.request]
    assert desk.metrics.utility.value == pytest.approx(2 * 0.8)


def test_utility_does_not_count_for_late_and_cancelled_requests(desk: Desk) -> None:
    early, late = desk.images(2)
    desk.end([early], 1050.0)
    desk.end([late], 1101.0)
    cancelled = desk.images(1)
    desk.executor.cancel(cancelled[0].request)
    desk.end(cancelled, 1050.0)
    dropped, waiting = desk.images(2)
    desk.executor._scheduler.add(waiting)
    desk.executor.cancel(dropped.request)
    desk.end([dropped], 1050.0)
    desk.executor._drop_cancelled()
    assert len(desk.finished) == 3
    assert desk.metrics.utility.value == 0


def test_an_error_midway_fails_the_requests_of_its_batch_alone(desk: Desk) -> None:
    broken = Task("broken", ("\ud800", "b"), {-4: 0.5, 0: 0.5, 2: 0.5}, 100.0, 1.0)
    before, after, waiting = desk.images(1), desk.images(1), desk.images(1)
    desk.executor._scheduler.add(waiting[0])
    desk.end([*before, *desk.images(1, task=broken), *after], 1050.0)
    assert len(desk.finished) == 3
    assert before[0].request.error is None
    errors = [request.error for request in desk.finished[1:]]
    assert all(isinstance(error, EngineError) and "surrogates not allowed" in str(error) for error in errors)
    assert len(desk.executor._scheduler) == 1 and len(desk.lines) == 1
    desk.end(waiting, 1050.0)
    assert desk.finished[-1] is waiting[0].request and waiting[0].request.error is None


def test_planning_is_timed_in_milliseconds(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter((7.0, 7.0035))
    monkeypatch.setattr(image_scheduler, "time", SimpleNamespace(perf_counter=lambda: next(reads)))
    for image in desk.images(1):
        desk.executor._scheduler.add(image)
    step = desk.executor._scheduler.step(desk.now)
    assert step.plan_ms == pytest.approx(3.5)
    desk.executor._run(step, desk.now)
    desk.executor._record(BatchResult(step, [np.ones(2, np.float32)], None, 1.0, 1001.0))
    assert desk.metrics.plan_ms.totals()[1] == pytest.approx(3.5)


def test_a_batch_is_timed_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter((1000.0, 1040.0))
    monkeypatch.setattr(model_runner, "now_ms", lambda: next(reads))
    model = RecordingModel()
    costs = Costs(model.profiles, model.gammas, 64)
    refused = ImageMetrics(model.gammas).refused_tasks
    runner = ModelRunner(model, costs, lambda result: None, refused, pytest.fail)
    request = ImageRequest(ImageRequestOptions(TASKS["animals"], 100.0, 1.0), 1, lambda request: None)
    images = request.waiting_images([np.zeros((SIZE, SIZE, 3), np.uint8)], model.gammas)
    result = runner._run(Step(images, 1, ()))
    assert (result.took_ms, result.ended_ms) == (40.0, 1040.0)
