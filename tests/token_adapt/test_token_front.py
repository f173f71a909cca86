"""The front with a recording model and a fake of Triton's side."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.serving.front import Client
from shapeshift.serving.metrics import Gauge
from shapeshift.serving.parameters import parse
from shapeshift.token_adapt import image_decoding
from shapeshift.token_adapt.front import ImageFront, ImageJob
from shapeshift.token_adapt.policy.image_scheduler import Timetable
from shapeshift.token_adapt.request import ImageRequestOptions, Task
from tests import waiting
from tests.fakes import PbUtils, Request, ResponseSender, TritonError, as_served
from tests.token_adapt.token_models import (
    LONG_MS,
    OUTPUTS,
    TASKS,
    Gate,
    RecordingModel,
    arguments,
    encoded,
    files_request,
    front,
    pixels_request,
    profile,
    square,
)

wait_for = partial(waiting.wait_for, timeout_s=60)


@pytest.fixture
def model() -> RecordingModel:
    return RecordingModel()


@pytest.fixture(autouse=True)
def no_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch is chosen when the running one has ended, from all images that have arrived."""
    monkeypatch.setattr("shapeshift.token_adapt.executor.Timetable", partial(Timetable, most_ms=0.0))


@pytest.fixture
def served(model: RecordingModel) -> Iterator[ImageFront]:
    made = front(model)
    yield made
    made.close()


def texts(request: Request, name: str) -> list[str]:
    return [value.decode() for value in request.vectors(name)[:, 0]]


def gauge(served: ImageFront, name: str) -> float:
    """The gauge of that name."""
    return next(one.read() for one in served.metrics() if isinstance(one, Gauge) and name in one.name)


def all_queued(served: ImageFront) -> bool:
    """Whether the images that the front took are decoded, and in the queue of the scheduler."""
    return not any(counter.has_work for counter in served.steps() if counter.name in ("decode", "executor"))


# Answers.


def test_an_image_is_answered_with_all_outputs(served: ImageFront, model: RecordingModel) -> None:
    request = pixels_request(1)
    served.execute([request])
    assert texts(request, "LABEL") == ["dog"]
    assert request.vectors("PROBABILITIES").tolist() == [[0.0, 1.0]]
    assert request.vectors("GAMMA").tolist() == [[2]]
    assert request.vectors("BATCH_SIZE").tolist() == [[1]]
    assert texts(request, "OUTCOME") == ["in_time"]
    assert {name: request.vectors(name).dtype.kind for name in OUTPUTS} == {
        **dict.fromkeys(("LABEL", "OUTCOME"), "O"),
        **dict.fromkeys(("GAMMA", "BATCH_SIZE"), "i"),
        "PROBABILITIES": "f",
    }
    assert model.runs == [(2, [1], ["animals"])]


def test_files_and_pixels_give_the_same(served: ImageFront) -> None:
    requests = [pixels_request(0, 1, 0), files_request(*(encoded(square(shade)) for shade in (0, 1, 0)))]
    served.execute(requests)
    for request in requests:
        assert texts(request, "LABEL") == ["cat", "dog", "cat"]
        assert request.vectors("PROBABILITIES").shape == (3, 2)


def test_images_of_other_sizes_are_resized(served: ImageFront) -> None:
    request = pixels_request(1, size=37)
    served.execute([request])
    assert texts(request, "LABEL") == ["dog"]


def test_a_request_without_inputs_is_told_what_the_model_is(served: ImageFront) -> None:
    asked, bad = Request((*OUTPUTS, "DESCRIPTION")), Request(OUTPUTS, {"task": "animals"})
    served.execute([asked, bad])
    found = json.loads(asked.vectors("DESCRIPTION").item())
    assert found["kind"] == "image_classification" and found["tasks"] == sorted(TASKS)
    assert set(found["outputs"]) == {*OUTPUTS, "EMBEDDING"}
    assert "labels" not in found, "no task is the default one"
    assert bad.refusal()[1].startswith("inputs: got 'none'; either IMAGE or PIXELS")


def test_a_front_tells_the_version_of_its_engines(model: RecordingModel) -> None:
    served, asked = front(model, manifest_sha256="0123456789abcdef"), Request(("DESCRIPTION",))
    served.execute([asked])
    assert json.loads(asked.vectors("DESCRIPTION").item())["engines"] == "0123456789ab"
    served.close()


def test_only_requested_outputs_are_sent(served: ImageFront) -> None:
    request = Request(("LABEL",), {"task": "digits"}, PIXELS=square(7)[None])
    served.execute([request])
    assert [tensor.name() for tensor in request.sender.answer().output_tensors()] == ["LABEL"]


def test_images_of_several_tasks_share_a_batch() -> None:
    gate = Gate()
    model = RecordingModel(gate)
    served = front(model, batch_size=64)
    first = pixels_request(0)
    served.execute([first])
    assert gate.entered.wait(120)
    others = [pixels_request(1, latency_ms=LONG_MS), pixels_request(7, task="digits", latency_ms=LONG_MS)]
    served.execute(others)
    wait_for(partial(all_queued, served))
    gate.opened.set()
    assert texts(others[0], "LABEL") == ["dog"] and texts(others[1], "LABEL") == ["7"]
    assert [request.vectors("BATCH_SIZE").tolist() for request in others] == [[[2]], [[2]]]
    assert model.runs[-1][1:] == ([1, 7], ["animals", "digits"])
    served.close()


def test_an_image_is_computed_at_gammas_that_its_task_has_and_booked_on_them(model: RecordingModel) -> None:
    """Of two tasks that wait together, the one without prompts is a call of its own, at 0."""
    gate = Gate()
    model = RecordingModel(gate)
    model.tasks = {**model.tasks, "plain": Task("plain", ("a", "b"), {-4: 0.9, 0: 1.0}, LONG_MS, 1.0)}
    pb_utils = PbUtils()
    served = front(model, pb_utils, batch_size=64)
    first = pixels_request(0)
    served.execute([first])
    assert gate.entered.wait(60)
    others = [pixels_request(1), pixels_request(0, 1, task="plain"), pixels_request(1)]
    served.execute(others)
    wait_for(partial(all_queued, served))
    gate.opened.set()
    assert [request.vectors("GAMMA").ravel().tolist() for request in others] == [[2], [0, 0], [2]]
    assert [request.vectors("BATCH_SIZE").ravel().tolist() for request in others] == [[2], [2, 2], [2]]
    served.close()
    assert sorted((gamma, *tasks) for gamma, _, tasks in model.runs) == [
        (0, "plain", "plain"),
        (2, "animals"),
        (2, "animals", "animals"),
    ]
    counted = {gamma: pb_utils.metric("shapeshift_gamma_images_total", gamma=str(gamma)) for gamma in model.gammas}
    assert counted == {-4: 0, 0: 2, 2: 3}


def test_a_task_that_has_none_of_the_gammas_in_use_is_refused(model: RecordingModel) -> None:
    model.tasks = {**model.tasks, "plain": Task("plain", ("a", "b"), {-4: 0.9, 0: 1.0}, LONG_MS, 1.0)}
    served = front(model, use_gammas="2")
    request = pixels_request(1, task="plain")
    served.execute([request])
    code, message = request.refusal()
    assert code == TritonError.INVALID_ARG and message.endswith("a task with prompts: use_gammas is 2")
    served.close()


def test_one_batch_is_chosen_before_the_running_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shapeshift.token_adapt.executor.Timetable", partial(Timetable, LONG_MS, LONG_MS))
    gate = Gate()
    model = RecordingModel(gate)
    model.profiles = {gamma: profile(gamma, LONG_MS / 10) for gamma in model.gammas}
    served = front(model, batch_size=1, latency_ms=100 * LONG_MS)
    requests = [pixels_request(shade, latency_ms=100 * LONG_MS) for shade in (0, 1, 1)]
    for request, running in zip(requests, (1, 2, 2), strict=True):
        served.execute([request])
        wait_for(lambda: gauge(served, "requests_running") == running)  # noqa: B023
    wait_for(partial(all_queued, served))
    assert gate.entered.wait(120) and len(model.runs) == 1
    gate.opened.set()
    assert [texts(request, "LABEL") for request in requests] == [["cat"], ["dog"], ["dog"]]
    assert [run[1] for run in model.runs] == [[0], [1], [1]]
    served.close()


# Outcomes.


def test_an_image_that_cannot_meet_its_deadline_is_evicted(served: ImageFront, model: RecordingModel) -> None:
    request = pixels_request(1, 0, latency_ms=0.01)
    served.execute([request])
    assert texts(request, "OUTCOME") == ["evicted", "evicted"]
    assert texts(request, "LABEL") == ["", ""]
    assert request.vectors("PROBABILITIES").tolist() == [[0.0, 0.0]] * 2
    assert request.vectors("GAMMA").tolist() == request.vectors("BATCH_SIZE").tolist() == [[0], [0]]
    assert model.runs == []


def test_an_image_that_overruns_its_deadline_is_late_and_keeps_its_label() -> None:
    latency_ms = 1500.0
    begun = []

    def run(gamma: int, count: int) -> None:
        begun.append(gamma)
        time.sleep(latency_ms / 1e3)

    served = front(RecordingModel(run))
    request = pixels_request(1, latency_ms=latency_ms)
    served.execute([request])
    assert texts(request, "OUTCOME") == ["late"] and begun
    assert texts(request, "LABEL") == ["dog"]
    served.close()


def test_an_image_that_waits_past_its_deadline_is_evicted() -> None:
    gate = Gate()
    served = front(RecordingModel(gate))
    first, second = pixels_request(1), pixels_request(1, latency_ms=200)
    served.execute([first])
    assert gate.entered.wait(120)
    served.execute([second])
    time.sleep(0.25)
    gate.opened.set()
    assert texts(second, "OUTCOME") == ["evicted"]
    assert texts(first, "OUTCOME") == ["in_time"]
    served.close()


def test_arrivals_do_not_wait_for_the_running_batch() -> None:
    gate = Gate()
    served = front(RecordingModel(gate))
    served.execute([pixels_request(1)])
    assert gate.entered.wait(120)
    came = threading.Thread(target=lambda: served.execute([pixels_request(1) for _ in range(50)]))
    came.start()
    came.join(60)
    assert not came.is_alive() and not gate.opened.is_set()
    gate.opened.set()
    served.close()


# Request parameters and inputs.


@pytest.mark.parametrize(
    ("parameters", "code", "message"),
    [
        ({"task": "plants"}, TritonError.NOT_FOUND, "no task 'plants'; registered tasks: animals, digits"),
        ({"task": ""}, TritonError.INVALID_ARG, "task"),
        ({"task": 3}, TritonError.INVALID_ARG, "task"),
        ({"latency_ms": 0}, TritonError.INVALID_ARG, "latency_ms: got 0; above 0"),
        ({"latency_ms": -5}, TritonError.INVALID_ARG, "latency_ms: got -5; above 0"),
        ({"latency_ms": 1e300}, TritonError.INVALID_ARG, "latency_ms: got 1e.300; at most"),
        ({"latency_ms": "soon"}, TritonError.INVALID_ARG, "latency_ms"),
        ({"utility": float("nan")}, TritonError.INVALID_ARG, "utility: got nan; a finite number"),
        ({"utility": float("inf")}, TritonError.INVALID_ARG, "utility"),
        ({"utility": -1}, TritonError.INVALID_ARG, "utility: got -1"),
        ({"utility": 1e300}, TritonError.INVALID_ARG, "utility"),
        ({"gamma": 4}, TritonError.INVALID_ARG, "gamma: got 4; unknown parameter"),
    ],
)
def test_errors_name_invalid_parameters(
    served: ImageFront, parameters: dict[str, Any], code: int, message: str
) -> None:
    request, good = pixels_request(1, **parameters), pixels_request(1)
    served.execute([request, good])
    refusal = request.refusal()
    assert refusal[0] == code
    import re

    assert re.search(message, refusal[1]), refusal[1]
    assert texts(good, "LABEL") == ["dog"]


def test_the_default_task_is_that_of_the_settings_or_the_only_one(model: RecordingModel) -> None:
    request = Request(OUTPUTS, PIXELS=square(7)[None])
    with_default = front(model, task="digits")
    with_default.execute([request])
    assert texts(request, "LABEL") == ["7"]
    with_default.close()
    none_named = Request(OUTPUTS, PIXELS=square(1)[None])
    undecided = front(model)
    undecided.execute([none_named])
    assert "the name of a registered task (animals, digits)" in none_named.refusal()[1]
    undecided.close()
    model.tasks = {"animals": TASKS["animals"]}
    only = Request(OUTPUTS, PIXELS=square(1)[None])
    alone = front(model)
    alone.execute([only])
    assert texts(only, "LABEL") == ["dog"]
    alone.close()
    model.tasks = TASKS | {"classifier": dataclasses.replace(TASKS["animals"], name="classifier", is_default=True)}
    own = Request(OUTPUTS, PIXELS=square(1)[None])
    with_own = front(model)
    with_own.execute([own])
    assert texts(own, "LABEL") == ["dog"]
    with_own.close()


def options(served: ImageFront, parameters: str) -> ImageRequestOptions:
    """Of a request with these parameters, JSON."""
    client = Client(ResponseSender(), wants_code=False)
    return served.parse(Request(OUTPUTS, PIXELS=square(1)[None]), parse(parameters, ("task",)), client).options


def test_the_latency_defaults_to_the_settings_then_to_the_task_and_the_utility_to_the_task(
    model: RecordingModel,
) -> None:
    made = front(model, latency_ms=250)
    plain = options(made, '{"task": "digits"}')
    assert (plain.latency_ms, plain.utility) == (250, TASKS["digits"].utility)
    given = options(made, '{"task": "digits", "latency_ms": 9, "utility": 0}')
    assert (given.latency_ms, given.utility) == (9, 0)
    made.close()
    made = front(model)
    assert options(made, '{"task": "digits"}').latency_ms == TASKS["digits"].latency_ms
    made.close()


@pytest.mark.parametrize(
    "request_",
    [
        files_request(b"no image"),
        files_request(encoded(square(1)), encoded(square(1), "JPEG")[:-9]),
        Request(OUTPUTS, {"task": "animals"}),
        Request(OUTPUTS, {"task": "animals"}, PIXELS=square(1)[None], IMAGE=np.array([[b"x"]], object)),
        Request(OUTPUTS, {"task": "animals"}, PIXELS=square(1)[None, :, :, :2]),
        Request(OUTPUTS, {"task": "animals"}, PIXELS=square(1)),
        Request(OUTPUTS, {"task": "animals"}, PIXELS=np.zeros((1, 0, 4, 3), np.uint8)),
        Request(OUTPUTS, {"task": "animals"}, PIXELS=np.zeros((0, 4, 4, 3), np.uint8)),
        Request(OUTPUTS, {"task": "animals"}, IMAGE=np.array([b"x"], object)),
        Request(OUTPUTS, {"task": "animals"}, IMAGE=np.array([[1]], object)),
    ],
    ids=[
        *("no image", "truncated", "no input", "both inputs", "two channels", "no batch axis", "no height"),
        *("no images", "no axis", "no bytes"),
    ],
)
def test_invalid_images_fail_only_their_own_request(served: ImageFront, request_: Request) -> None:
    before, after = pixels_request(1), pixels_request(0)
    served.execute([before, request_, after])
    assert request_.refusal()[0] == TritonError.INVALID_ARG
    assert texts(before, "LABEL") == ["dog"] and texts(after, "LABEL") == ["cat"]


def test_errors_name_the_invalid_row(served: ImageFront) -> None:
    request = files_request(encoded(square(1)), b"no image")
    served.execute([request])
    assert "row 1: IMAGE" in request.refusal()[1]


def test_an_image_beyond_max_pixels_is_refused(model: RecordingModel) -> None:
    served = front(model, max_pixels=100)
    request = pixels_request(1, size=11)
    served.execute([request])
    assert "at most 100 pixels" in request.refusal()[1]
    served.close()


# Faults.


def test_a_failed_batch_fails_only_its_own_requests() -> None:
    failing = threading.Event()

    def run(gamma: int, count: int) -> None:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("no device")

    served = front(RecordingModel(run))
    failing.set()
    request = pixels_request(1)
    served.execute([request])
    assert request.refusal() == (TritonError.INTERNAL, "the engine failed: no device")
    later = pixels_request(1)
    served.execute([later])
    assert texts(later, "LABEL") == ["dog"]
    served.close()


def test_tasks_are_reloaded_between_batches(model: RecordingModel) -> None:
    pb_utils = PbUtils()
    served = front(model, pb_utils)
    model.messages = ["task weeds: refused"]
    wait_for(lambda: any("task weeds: refused" in line for line in pb_utils.Logger.lines))
    served.close()
    assert pb_utils.metric("shapeshift_tasks_refused_total") == 1


def on_cancel(served: ImageFront) -> threading.Event:
    """Set when a request has been cancelled."""
    reported, cancel = threading.Event(), served.cancel

    def report(job: ImageJob) -> None:
        cancel(job)
        reported.set()

    served.cancel = report  # type: ignore[method-assign]
    return reported


def test_a_cancelled_request_does_not_run() -> None:
    gate = Gate()
    model = RecordingModel(gate)
    served = front(model)
    cancelled = on_cancel(served)
    served.execute([pixels_request(0)])
    assert gate.entered.wait(120)
    cancelled_request = pixels_request(1)
    cancelled_request.sender.cancelled = True
    served.execute([cancelled_request])
    assert cancelled.wait(120)
    gate.opened.set()
    assert cancelled_request.refusal()[0] == TritonError.CANCELLED
    assert [shades for _, shades, _ in model.runs] == [[0]]
    served.close()


def test_no_images_wait_while_images_of_a_cancelled_request_run() -> None:
    gate = Gate()
    served = front(RecordingModel(gate), batch_size=2, latency_ms=LONG_MS)
    cancelled_request, woken = pixels_request(0, 0, 0, latency_ms=LONG_MS), pixels_request(1, latency_ms=LONG_MS)
    cancelled = on_cancel(served)
    served.execute([cancelled_request])
    assert gate.entered.wait(120)
    assert (gauge(served, "requests_running"), gauge(served, "requests_waiting")) == (2, 1)
    cancelled_request.sender.cancelled = True
    assert cancelled.wait(120)
    served.execute([woken])
    assert cancelled_request.refusal()[0] == TritonError.CANCELLED
    assert (gauge(served, "requests_running"), gauge(served, "requests_waiting")) == (2, 0)
    gate.opened.set()
    assert texts(woken, "LABEL") == ["dog"]
    wait_for(lambda: gauge(served, "requests_running") == 0)
    served.close()


def test_waiting_requests_fail_when_the_model_is_unloaded() -> None:
    gate = Gate()
    served = front(RecordingModel(gate))
    running, waiting = pixels_request(1), pixels_request(1)
    served.execute([running])
    assert gate.entered.wait(120)
    served.execute([waiting])
    closing = threading.Thread(target=served.close)
    closing.start()
    wait_for(served._executor._closing.is_set)
    gate.opened.set()
    closing.join(60)
    assert texts(running, "LABEL") == ["dog"]
    assert waiting.refusal()[0] == TritonError.UNAVAILABLE


def test_metrics_count_images_batches_and_requests(model: RecordingModel) -> None:
    pb_utils = PbUtils()
    served = front(model, pb_utils)
    requests = [pixels_request(1, 0), pixels_request(1, latency_ms=0.01), pixels_request(1, task="plants")]
    served.execute(requests)
    for request in requests:
        request.sender.answer()
    served.close()
    assert pb_utils.metric("shapeshift_images_total", outcome="in_time") == 2
    assert pb_utils.metric("shapeshift_images_total", outcome="evicted") == 1
    assert pb_utils.metric("shapeshift_gamma_images_total", gamma="2") == 2
    assert pb_utils.metric("shapeshift_batch_images_sum") == 2
    assert pb_utils.metric("shapeshift_plan_ms_count") >= 1
    assert pb_utils.metric("shapeshift_utility_total") == pytest.approx(2 * 0.9)
    assert pb_utils.metric("shapeshift_requests_total", code="OK") == 2
    assert pb_utils.metric("shapeshift_requests_total", code="NOT_FOUND") == 1
    assert pb_utils.metric("shapeshift_requests_waiting") == 0
    assert pb_utils.metric("shapeshift_tasks") == 2


# Loading.


def test_an_image_model_can_be_loaded_again(model: RecordingModel) -> None:
    """By `shapeshift reload`, and by the sidecar after its process has died: both raise the generation."""
    args = arguments(generation=3)
    assert args.generation == 3 and "generation" not in args.parameters
    ImageFront(PbUtils(), args, lambda args, own: model).close()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"algorithm": "best"}, "algorithm: got 'best'; one of grid, front"),
        ({"use_gammas": "0,x"}, "use_gammas: got '0,x'"),
        ({"use_gammas": "0,7"}, "use_gammas: got 7; gammas of the model: -4, 0, 2"),
        ({"utility": 1}, "utility: got 'utility'; this setting is gone: "),
        ({"batch_size": -1}, "batch_size"),
        ({"latency": 5}, "latency: got 'latency'; unknown parameter"),
    ],
)
def test_errors_name_invalid_settings(model: RecordingModel, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        front(model, **parameters)


def test_an_emulated_model_needs_no_engines(tmp_path: Path) -> None:
    from shapeshift.token_adapt.model import emulated
    from tests.token_adapt.token_models import PROFILES

    emulated.write(tmp_path / "model.json", 8, list(PROFILES.values()), list(TASKS.values()))
    stated = arguments(provider="emulated", profile_file=str(tmp_path / "model.json"))
    served = as_served(ImageFront(PbUtils(), stated))
    request = pixels_request(3)
    served.execute([request])
    assert texts(request, "LABEL") == ["cat"]
    served.close()


# Decoding.


class HeldDecoding:
    """Holds every decoding until `opened` is set; counts those that began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = 0
        self.opened = threading.Event()
        fit = image_decoding.fit

        def held(*arguments: object) -> np.ndarray:
            self.began += 1
            assert self.opened.wait(120)
            return fit(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(image_decoding, "fit", held)


def test_late_and_cancelled_images_are_not_decoded(
    served: ImageFront, model: RecordingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = HeldDecoding(monkeypatch)
    cancelled = on_cancel(served)
    first, late, gone, last = (pixels_request(1, latency_ms=own) for own in (LONG_MS, 50, LONG_MS, LONG_MS))
    served.execute([first, late, gone, last])
    wait_for(lambda: decoding.began == 1)
    gone.sender.cancelled = True
    assert cancelled.wait(120)
    time.sleep(0.05)
    decoding.opened.set()
    assert texts(late, "OUTCOME") == ["evicted"]
    assert gone.refusal()[0] == TritonError.CANCELLED
    assert texts(first, "LABEL") == texts(last, "LABEL") == ["dog"]
    assert decoding.began == 2


def test_a_request_that_decoding_would_make_late_is_refused_at_once(
    served: ImageFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = HeldDecoding(monkeypatch)
    served._decoders.image_ms = 1000.0
    held = pixels_request(1, 1, 1, latency_ms=LONG_MS)
    served.execute([held])
    wait_for(lambda: decoding.began == 1)
    # Three wait on one thread, and its own one.
    refused, accepted = pixels_request(1, latency_ms=3900), pixels_request(1, latency_ms=LONG_MS)
    served.execute([refused, accepted])
    code, message = refused.refusal()
    assert code == TritonError.UNAVAILABLE
    assert re.fullmatch(
        r"latency_ms: got 3900, an answer is predicted after 40\d\d ms; retry later or elsewhere", message
    )
    decoding.opened.set()
    for request in (held, accepted):
        assert set(texts(request, "LABEL")) == {"dog"}
    wait_for(lambda: served.load() == 0)
    # Measured in milliseconds.
    assert 0 < served._decoders.image_ms < 1000


def test_waiting_images_are_bounded_in_bytes(model: RecordingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = HeldDecoding(monkeypatch)
    served = front(model, queue_mb=2)
    large, also, refused = (pixels_request(1, size=500, latency_ms=LONG_MS) for _ in range(3))
    served.execute([large, also, refused])
    code, message = refused.refusal()
    assert (code, message) == (TritonError.UNAVAILABLE, "queue_mb: 2 MiB wait, 1 more would exceed 2; retry later")
    decoding.opened.set()
    assert texts(large, "LABEL") == texts(also, "LABEL") == ["dog"]
    again = pixels_request(1, size=500, latency_ms=LONG_MS)
    wait_for(lambda: served.load() == 0)
    served.execute([again])
    assert texts(again, "LABEL") == ["dog"]
    served.close()


def test_pixels_are_not_copied_before_their_size_is_checked(
    model: RecordingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = front(model, max_pixels=100)
    request = pixels_request(1, size=11)
    monkeypatch.setattr("shapeshift.token_adapt.front.np.array", lambda *given, **named: pytest.fail("copied"))
    served.execute([request])
    assert request.refusal() == (TritonError.INVALID_ARG, "row 0: image: got '11 x 11 pixels'; at most 100 pixels")
    monkeypatch.undo()
    served.close()


def test_a_line_of_the_log_says_what_became_of_the_images(model: RecordingModel) -> None:
    pb_utils = PbUtils()
    served = front(model, pb_utils, log_requests=1)
    request = pixels_request(0, 1)
    served.execute([request])
    request.vectors("GAMMA")
    (line,) = pb_utils.Logger.requests(1)
    served.close()
    assert (line["task"], line["images"], line["gammas"], line["images_in_time"]) == ("animals", 2, [2], 2)
    assert line["outcome"] == "OK" and line["ms"] >= line["compute_ms"] > 0
