"""The executor on a recording model, and its timetable on a clock of the test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.errors import EngineError
from shapeshift.serving.traces import Tracer
from shapeshift.token_adapt.executor import Executor
from shapeshift.token_adapt.policy.costs import Costs
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler, SchedulerSettings, Timetable
from shapeshift.token_adapt.request import IN_TIME, LATE, ImageRequest, ImageRequestOptions, RequestImage, Task, now_ms
from tests.fakes import logger
from tests.recording import recording
from tests.serving.otlp import Receiver, traced_request
from tests.serving.otlp import receiver as receiver
from tests.token_adapt.token_models import LONG_MS, SIZE, TASKS, Gate, RecordingModel
from tests.waiting import wait_for

MARGIN_MS = 3.0


class Desk:
    """An executor whose model runs while the gate is open."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.model = RecordingModel(self.gate)
        self.costs = Costs(self.model.profiles, self.model.gammas, 8)
        settings = SchedulerSettings(margin_ms=MARGIN_MS)
        scheduler: ImageScheduler[RequestImage] = ImageScheduler(self.costs, settings, now_ms())
        self.lines: list[str] = []
        self.executor = Executor(self.model, scheduler, logger(self.lines))
        self.metrics = self.executor.metrics
        self.finished: list[ImageRequest] = []

    def submit(self, count: int, latency_ms: float = LONG_MS, task: Task = TASKS["animals"]) -> ImageRequest:
        request = ImageRequest(ImageRequestOptions(task, latency_ms, 1.0), count, self.finished.append)
        self.executor.submit(request, [np.zeros((SIZE, SIZE, 3), np.uint8)] * count)
        return request

    def run_held(self, count: int = 1, latency_ms: float = LONG_MS) -> ImageRequest:
        """A request whose images run until the gate opens."""
        request = self.submit(count, latency_ms)
        assert self.gate.entered.wait(60)
        return request


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    desk.executor.start()
    yield desk
    desk.gate.opened.set()
    desk.executor.close()


def test_a_decision_comes_shortly_before_the_running_batch_ends() -> None:
    timetable = Timetable()
    assert timetable.decision_ms(1000.0) == 0.0 and timetable.free_from(1000.0) == 1000.0
    timetable.add(1000.0, 500.0)
    assert timetable.decision_ms(1000.0) == pytest.approx(499.0)
    assert timetable.decision_ms(1499.5) == 0.0 and timetable.free_from(1499.5) == 1500.0
    assert timetable.decision_ms(1500.0) is None, "the batch overruns its prediction"


def test_the_end_of_a_batch_is_predicted_and_corrected() -> None:
    """From the instant at which the batch before it really ended."""
    timetable = Timetable()
    timetable.add(1000.0, 10.0)
    timetable.add(timetable.free_from(1000.0), 20.0)
    assert timetable.free_from(1000.0) == pytest.approx(1030.0)
    assert timetable.decision_ms(1000.0) is None, "one batch runs and the next is chosen"
    timetable.end(1007.0)
    assert timetable.free_from(1007.0) == pytest.approx(1027.0) and not timetable.is_idle
    timetable.end(1027.0)
    assert timetable.is_idle


def test_a_decision_begins_earlier_where_decisions_take_long() -> None:
    timetable = Timetable()
    timetable.add(0.0, 500.0)
    timetable.decided(4.0)
    # A tenth of the way from 1 ms to twice the time and 1 ms.
    assert timetable.decision_ms(0.0) == pytest.approx(500.0 - (1.0 + 0.1 * (2 * 4.0 + 1.0 - 1.0)))
    for _ in range(100):
        timetable.decided(50.0)
    assert timetable.decision_ms(0.0) == pytest.approx(480.0)


def test_what_a_deadline_needs(desk: Desk) -> None:
    """The time of one image, or of two full batches, and the margin."""
    alone = desk.costs.min_time(1) + MARGIN_MS
    assert desk.executor.can_meet(now_ms() + alone + LONG_MS) and not desk.executor.can_meet(now_ms() + alone)
    assert desk.executor.usual_ms == pytest.approx(2 * desk.costs.min_time(desk.costs.max_size) + MARGIN_MS)


def test_utility_counts_for_requests_that_end_in_time(desk: Desk) -> None:
    request = desk.run_held(2)
    assert desk.metrics.utility.value == 0
    desk.gate.opened.set()
    wait_for(lambda: desk.metrics.utility.value > 0)
    assert desk.finished == [request] and request.outcomes == [IN_TIME] * 2
    assert desk.metrics.utility.value == pytest.approx(2 * 0.9)


def test_a_trace_shows_each_batch_with_its_gamma(desk: Desk, receiver: Receiver) -> None:
    tracer = Tracer("classify_image")
    held = desk.run_held()
    request = ImageRequest(ImageRequestOptions(TASKS["animals"], LONG_MS, 1.0), 9, desk.finished.append)
    request.trace = tracer.begin(traced_request())
    assert request.trace is not None
    desk.executor.submit(request, [np.zeros((SIZE, SIZE, 3), np.uint8)] * 9)
    desk.gate.opened.set()
    wait_for(lambda: len(desk.finished) == 2)
    request.trace.end({}, "OK")
    tracer.close()
    (span,), batches = receiver.named("classify_image"), receiver.named("batch")
    assert [(one.parent, one.attributes["images"]) for one in batches] == [(span.id, 8), (span.id, 1)]
    assert {one.attributes["gamma"] for one in batches} == set(request.gammas.ravel().tolist())
    for one in batches:
        assert one.attributes["predicted_ms"] > 0 and one.attributes["slack_ms"] > 0
        assert one.attributes["waited_ms"] == pytest.approx(1e3 * (one.began - span.began), abs=50)
    assert held.trace is None


def test_utility_does_not_count_for_late_and_cancelled_requests(desk: Desk) -> None:
    late, cancelled = desk.run_held(latency_ms=200.0), desk.submit(2)
    desk.executor.cancel(cancelled)
    time.sleep(0.001 * max(0.0, late.deadline - now_ms()))
    desk.gate.opened.set()
    wait_for(lambda: len(desk.finished) == 2)
    assert late.outcomes == [LATE] and cancelled.error is not None
    assert desk.metrics.utility.value == 0


def test_an_error_midway_fails_the_requests_of_its_batch_alone(desk: Desk) -> None:
    broken = Task("broken", ("\ud800", "b"), {-4: 0.5, 0: 0.5, 2: 0.5}, 100.0, 1.0)
    held = desk.run_held()
    before, failing, after = desk.submit(1), desk.submit(1, task=broken), desk.submit(1)
    desk.gate.opened.set()
    wait_for(lambda: len(desk.finished) == 4)
    assert held.error is None and before.error is None
    for request in (failing, after):
        assert isinstance(request.error, EngineError) and "surrogates not allowed" in str(request.error)
    assert len(desk.lines) == 1
    later = desk.submit(1)
    wait_for(lambda: later in desk.finished)
    assert later.error is None


def test_a_batch_is_timed_in_the_unit_of_its_profile(desk: Desk) -> None:
    """Milliseconds: one that is held is slower than its profile, and so are those that follow."""
    desk.run_held()
    time.sleep(0.05)
    desk.gate.opened.set()
    wait_for(lambda: desk.costs.factor != 1.0)
    assert desk.costs.factor > 1.0


def test_a_batch_is_recorded_with_what_it_earned(desk: Desk, tmp_path: Path) -> None:
    with recording(tmp_path) as reader:
        held = desk.run_held(2)
        desk.gate.opened.set()
        wait_for(lambda: held in desk.finished)
        batches: list[dict[str, Any]] = []

        def is_read() -> bool:
            batches.extend(event.values for event in reader.read() if event.kind == "batch")
            return bool(batches)

        wait_for(is_read, 20.0)
    assert (batches[0]["images"], batches[0]["in_time"]) == (2, 2)
    assert len(batches[0]["earns"]) == len(desk.costs.gammas)
