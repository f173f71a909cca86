"""The front over a model of the tests and a fake of Triton's side."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from token_models import (
    LONG_MS,
    OUTPUTS,
    TASKS,
    Gate,
    Watched,
    arguments,
    encoded,
    files_request,
    front,
    pixels_request,
    profile,
    square,
)

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt import loading
from shapeshift.token_adapt.front import ImageFront
from shapeshift.token_adapt.interfaces import Task
from shapeshift.token_adapt.request import ImageRequest
from tests import waiting
from tests.fakes import PbUtils, Request, TritonError

wait_for = partial(waiting.wait_for, timeout_s=60)


@pytest.fixture
def model() -> Watched:
    return Watched()


@pytest.fixture(autouse=True)
def no_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch is chosen when the one that runs has ended, with all that came meanwhile."""
    monkeypatch.setattr("shapeshift.token_adapt.executor._MOST_LEAD_MS", 0.0)


@pytest.fixture
def served(model: Watched) -> Iterator[ImageFront]:
    made = front(model)
    yield made
    made.close()


def texts(request: Request, name: str) -> list[str]:
    return [value.decode() for value in request.vectors(name)[:, 0]]


# Answers.


def test_an_image_is_answered_with_all_outputs(served: ImageFront, model: Watched) -> None:
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
    assert model.runs == [(2, [1], [0])]


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


def test_only_outputs_that_were_asked_for_are_sent(served: ImageFront) -> None:
    request = Request(("LABEL",), {"task": "digits"}, PIXELS=square(7)[None])
    served.execute([request])
    assert [tensor.name() for tensor in request.sender.answer().output_tensors()] == ["LABEL"]


def test_images_of_several_tasks_share_a_batch() -> None:
    gate = Gate()
    model = Watched(gate)
    served = front(model, batch_share=0)
    first = pixels_request(0)
    served.execute([first])
    assert gate.entered.wait(60)
    others = [pixels_request(1, latency_ms=LONG_MS), pixels_request(7, task="digits", latency_ms=LONG_MS)]
    served.execute(others)
    wait_for(lambda: len(served._executor._adapter) == 2)
    gate.opened.set()
    assert texts(others[0], "LABEL") == ["dog"] and texts(others[1], "LABEL") == ["7"]
    assert [request.vectors("BATCH_SIZE").tolist() for request in others] == [[[2]], [[2]]]
    assert model.runs[-1][1:] == ([1, 7], [0, 1])
    served.close()


def test_one_batch_is_chosen_before_the_one_that_runs_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_LEAD_MS", "_MOST_LEAD_MS"):
        monkeypatch.setattr(f"shapeshift.token_adapt.executor.{name}", LONG_MS)
    gate = Gate()
    model = Watched(gate)
    model.profiles = {gamma: profile(gamma, LONG_MS / 10) for gamma in model.gammas}
    served = front(model, batch_size=1, latency_ms=100 * LONG_MS)
    requests = [pixels_request(shade, latency_ms=100 * LONG_MS) for shade in (0, 1, 1)]
    for request, running in zip(requests, (1, 2, 2), strict=True):
        served.execute([request])
        wait_for(lambda running=running: served._executor.running == running)
    wait_for(lambda: len(served._executor._adapter) == 1)
    assert gate.entered.wait(60) and len(model.runs) == 1
    gate.opened.set()
    assert [texts(request, "LABEL") for request in requests] == [["cat"], ["dog"], ["dog"]]
    assert [run[1] for run in model.runs] == [[0], [1], [1]]
    served.close()


# Outcomes.


def test_a_query_that_cannot_make_its_deadline_is_answered_as_evicted(served: ImageFront, model: Watched) -> None:
    request = pixels_request(1, 0, latency_ms=0.01)
    served.execute([request])
    assert texts(request, "OUTCOME") == ["evicted", "evicted"]
    assert texts(request, "LABEL") == ["", ""]
    assert request.vectors("PROBABILITIES").tolist() == [[0.0, 0.0]] * 2
    assert request.vectors("GAMMA").tolist() == request.vectors("BATCH_SIZE").tolist() == [[0], [0]]
    assert model.runs == []


def test_a_query_that_runs_past_its_deadline_is_late_and_keeps_its_label() -> None:
    latency_ms = 1500.0
    begun = []

    def run(gamma: int, count: int) -> None:
        begun.append(gamma)
        time.sleep(latency_ms / 1e3)

    served = front(Watched(run))
    request = pixels_request(1, latency_ms=latency_ms)
    served.execute([request])
    assert texts(request, "OUTCOME") == ["late"] and begun
    assert texts(request, "LABEL") == ["dog"]
    served.close()


def test_what_waits_behind_a_long_batch_is_evicted_when_its_time_is_over() -> None:
    gate = Gate()
    served = front(Watched(gate))
    first, second = pixels_request(1), pixels_request(1, latency_ms=200)
    served.execute([first])
    assert gate.entered.wait(60)
    served.execute([second])
    time.sleep(0.25)
    gate.opened.set()
    assert texts(second, "OUTCOME") == ["evicted"]
    assert texts(first, "OUTCOME") == ["in_time"]
    served.close()


def test_arrivals_do_not_wait_for_a_batch_that_runs() -> None:
    gate = Gate()
    served = front(Watched(gate))
    served.execute([pixels_request(1)])
    assert gate.entered.wait(60)
    came = threading.Thread(target=lambda: served.execute([pixels_request(1) for _ in range(50)]))
    came.start()
    came.join(60)
    assert not came.is_alive() and not gate.opened.is_set()
    gate.opened.set()
    served.close()


# What requests ask for.


@pytest.mark.parametrize(
    ("parameters", "code", "message"),
    [
        ({"task": "plants"}, TritonError.NOT_FOUND, "no task 'plants'; there are: animals, digits"),
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
def test_bad_parameters_are_named(served: ImageFront, parameters: dict[str, object], code: int, message: str) -> None:
    request, good = pixels_request(1, **parameters), pixels_request(1)
    served.execute([request, good])
    told = request.refusal()
    assert told[0] == code
    import re

    assert re.search(message, told[1]), told[1]
    assert texts(good, "LABEL") == ["dog"]


def test_without_a_task_the_models_own_is_meant_or_the_only_one(model: Watched) -> None:
    request = Request(OUTPUTS, PIXELS=square(7)[None])
    with_default = front(model, task="digits")
    with_default.execute([request])
    assert texts(request, "LABEL") == ["7"]
    with_default.close()
    none_named = Request(OUTPUTS, PIXELS=square(1)[None])
    undecided = front(model)
    undecided.execute([none_named])
    assert "the name of a task: animals, digits" in none_named.refusal()[1]
    undecided.close()
    model.tasks = {"animals": TASKS["animals"]}
    only = Request(OUTPUTS, PIXELS=square(1)[None])
    alone = front(model)
    alone.execute([only])
    assert texts(only, "LABEL") == ["dog"]
    alone.close()


def test_latency_and_utility_default_to_the_models_and_then_to_the_tasks(model: Watched) -> None:
    from shapeshift.serving.parameters import parse

    made = front(model, latency_ms=250, utility=0.5)
    assert made._wish(parse('{"task": "digits"}', ("task",))).latency_ms == 250
    assert made._wish(parse('{"task": "digits"}', ("task",))).utility == 0.5
    given = made._wish(parse('{"task": "digits", "latency_ms": 9, "utility": 0}', ("task",)))
    assert (given.latency_ms, given.utility) == (9, 0)
    made.close()
    plain = front(model)
    own = plain._wish(parse('{"task": "digits"}', ("task",)))
    assert (own.latency_ms, own.utility) == (TASKS["digits"].latency_ms, TASKS["digits"].utility)
    plain.close()


@pytest.mark.parametrize(
    "request_",
    [
        files_request(b"no image"),
        files_request(encoded(square(1)), encoded(square(1), "JPEG")[:-9]),
        files_request(encoded(square(1)[:, :, 0])),
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
        *("no image", "truncated", "grey", "no input", "both inputs", "two channels", "no batch axis", "no height"),
        *("no images", "no axis", "no bytes"),
    ],
)
def test_bad_images_cost_their_own_request_alone(served: ImageFront, request_: Request) -> None:
    before, after = pixels_request(1), pixels_request(0)
    served.execute([before, request_, after])
    assert request_.refusal()[0] == TritonError.INVALID_ARG
    assert texts(before, "LABEL") == ["dog"] and texts(after, "LABEL") == ["cat"]


def test_a_bad_row_is_named(served: ImageFront) -> None:
    request = files_request(encoded(square(1)), b"no image")
    served.execute([request])
    assert "row 1: IMAGE" in request.refusal()[1]


def test_an_image_beyond_max_pixels_is_refused(model: Watched) -> None:
    served = front(model, max_pixels=100)
    request = pixels_request(1, size=11)
    served.execute([request])
    assert "at most 100 pixels" in request.refusal()[1]
    served.close()


# Faults.


def test_a_batch_that_fails_costs_its_own_requests_alone() -> None:
    failing = threading.Event()

    def run(gamma: int, count: int) -> None:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("no device")

    served = front(Watched(run))
    failing.set()
    request = pixels_request(1)
    served.execute([request])
    assert request.refusal() == (TritonError.INTERNAL, "the engine failed: no device")
    later = pixels_request(1)
    served.execute([later])
    assert texts(later, "LABEL") == ["dog"]
    served.close()


def test_a_task_that_changed_while_a_request_waited_is_told_so(model: Watched) -> None:
    model.tasks = {"animals": Task("animals", ("one",), {0: 1.0}, LONG_MS, 1.0, 0)}
    served = front(model)
    request = pixels_request(1)
    served.execute([request])
    code, message = request.refusal()
    assert code == TritonError.UNAVAILABLE and "task animals was changed" in message
    served.close()


def test_tasks_are_looked_for_between_batches(model: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shapeshift.token_adapt.device._LOOK_S", 0.01)
    pb_utils = PbUtils()
    served = front(model, pb_utils)
    model.messages = ["task weeds: refused"]
    wait_for(lambda: any("task weeds: refused" in line for line in pb_utils.Logger.lines))
    served.close()
    assert pb_utils.metric("shapeshift_tasks_refused_total") == 1


def test_a_full_queue_is_told_at_once() -> None:
    gate = Gate()
    served = front(Watched(gate), queue_images=3)
    first = pixels_request(1, 1, 1, 1)
    served.execute([first])
    assert gate.entered.wait(60)
    refused = pixels_request(1)
    served.execute([refused])
    code, message = refused.refusal()
    assert code == TritonError.UNAVAILABLE and "4 images wait, 1 more exceed 3" in message
    gate.opened.set()
    assert texts(first, "OUTCOME") == ["in_time"] * 4
    served.close()


def told_of_cancellation(served: ImageFront) -> threading.Event:
    """Set once the executor knows of a caller who has gone."""
    told, cancel = threading.Event(), served._executor.cancel

    def noted(request: ImageRequest) -> None:
        cancel(request)
        told.set()

    served._executor.cancel = noted  # type: ignore[method-assign]
    return told


def test_a_caller_who_has_gone_is_not_served() -> None:
    gate = Gate()
    model = Watched(gate)
    served = front(model)
    told = told_of_cancellation(served)
    served.execute([pixels_request(0)])
    assert gate.entered.wait(60)
    gone = pixels_request(1)
    gone.sender.cancelled = True
    served.execute([gone])
    assert told.wait(60)
    gate.opened.set()
    assert gone.refusal()[0] == TritonError.CANCELLED
    assert [shades for _, shades, _ in model.runs] == [[0]]
    served.close()


def test_no_images_wait_while_those_of_a_caller_who_has_gone_still_run() -> None:
    gate = Gate()
    served = front(Watched(gate), batch_size=2, latency_ms=LONG_MS)
    gone, woken = pixels_request(0, 0, 0, latency_ms=LONG_MS), pixels_request(1, latency_ms=LONG_MS)
    told = told_of_cancellation(served)
    served.execute([gone])
    assert gate.entered.wait(60)
    assert (served._executor.running, served._images_waiting()) == (2, 1)
    gone.sender.cancelled = True
    assert told.wait(60)
    served.execute([woken])
    assert gone.refusal()[0] == TritonError.CANCELLED
    assert (served._executor.running, served._images_waiting()) == (2, 0)
    gate.opened.set()
    assert texts(woken, "LABEL") == ["dog"]
    wait_for(lambda: served._executor.running == 0)
    served.close()


def test_what_waits_at_the_end_is_told_so() -> None:
    gate = Gate()
    served = front(Watched(gate))
    running, waiting = pixels_request(1), pixels_request(1)
    served.execute([running])
    assert gate.entered.wait(60)
    served.execute([waiting])
    closing = threading.Thread(target=served.close)
    closing.start()
    wait_for(served._executor._closing.is_set)
    gate.opened.set()
    closing.join(60)
    assert texts(running, "LABEL") == ["dog"]
    assert waiting.refusal()[0] == TritonError.UNAVAILABLE


def test_what_is_counted(model: Watched) -> None:
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


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"algorithm": "best"}, "algorithm: got 'best'; one of grid, front"),
        ({"use_gammas": "0,x"}, "use_gammas: got '0,x'"),
        ({"use_gammas": "0,7"}, "use_gammas: got 7; gammas of the model: -4, 0, 2"),
        ({"utility": -1}, "utility"),
        ({"batch_size": 0}, "batch_size"),
        ({"latency": 5}, "latency: got 'latency'; unknown parameter"),
    ],
)
def test_bad_settings_are_named(model: Watched, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        front(model, **parameters)


def test_gammas_and_batches_are_those_of_the_settings(model: Watched) -> None:
    found = loading.load(arguments(use_gammas="0,-4", batch_share=0), lambda text: None, lambda args, own: model)
    assert found.costs.gammas == (-4, 0)
    assert found.rules.batching.size == 64
    fitted = loading.load(arguments(), lambda text: None, lambda args, own: model)
    assert fitted.rules.batching.size < 64
    tight = loading.load(arguments(memory_mb=10, batch_share=0), lambda text: None, lambda args, own: model)
    assert tight.rules.batching.size == 9
    assert tight.rules.memory_mb == 10


def test_an_emulated_model_needs_no_engines(tmp_path: Path) -> None:
    from token_models import PROFILES

    from shapeshift.token_adapt import emulated

    emulated.write(tmp_path / "model.json", 8, list(PROFILES.values()), list(TASKS.values()))
    stated = arguments(provider="emulated", profile_file=str(tmp_path / "model.json"), time_scale=2)
    served = ImageFront(PbUtils(), stated)
    request = pixels_request(3)
    served.execute([request])
    assert texts(request, "LABEL") == ["cat"]
    served.close()
    assert served._model.profiles[0].latency_ms[1] == pytest.approx(2 * PROFILES[0].latency_ms[1])
