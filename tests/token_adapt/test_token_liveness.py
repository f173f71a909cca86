"""Threads of the image front that hang."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shapeshift.token_adapt import image_decoding
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler
from tests.fakes import PbUtils
from tests.stalls import only_stalled, watched, without_patience
from tests.token_adapt.token_models import Gate, RecordingModel, front, pixels_request
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    without_patience(monkeypatch)


def test_the_thread_of_the_model() -> None:
    gate, pb_utils = Gate(), PbUtils()
    served = front(RecordingModel(gate), pb_utils)
    requests = [pixels_request(1), pixels_request(2)]
    try:
        with only_stalled(pb_utils, "model-runner", gate.opened.set):
            # The executor waits for the model and is not to blame.
            served.execute(requests)
        for request in requests:
            request.vectors("LABEL")
        assert watched(pb_utils) == {"execute", "responses", "errors", "decode", "executor", "model-runner"}
    finally:
        gate.opened.set()
        served.close()


@pytest.mark.parametrize(
    ("thread", "place", "name"), [("executor", ImageScheduler, "step"), ("decode", image_decoding, "fit")]
)
def test_the_threads_that_decide_and_decode(
    monkeypatch: pytest.MonkeyPatch, thread: str, place: object, name: str
) -> None:
    opened, pb_utils = threading.Event(), PbUtils()
    step = getattr(place, name)

    def wait(*arguments: Any) -> Any:
        assert opened.wait(120)
        return step(*arguments)

    monkeypatch.setattr(place, name, wait)
    served = front(RecordingModel(), pb_utils)
    try:
        request = pixels_request(1)
        with only_stalled(pb_utils, thread, opened.set):
            served.execute([request])
        request.vectors("LABEL")
    finally:
        opened.set()
        served.close()


def test_loading_tasks_is_no_stall() -> None:
    opened, entered, pb_utils = threading.Event(), threading.Event(), PbUtils()
    model = RecordingModel()

    def load() -> list[str]:
        entered.set()
        assert opened.wait(120)
        return []

    served = front(model, pb_utils)
    (runner,) = [counter for counter in served.steps() if counter.name == "model-runner"]
    try:
        model.reload_tasks = load  # type: ignore[method-assign]
        wait_for(entered.is_set)
        request = pixels_request(1)
        served.execute([request])
        wait_for(lambda: not any(one.has_work for one in served.steps() if one.name in ("decode", "executor")))
        assert not runner.has_work
        opened.set()
        request.vectors("LABEL")
    finally:
        opened.set()
        served.close()
