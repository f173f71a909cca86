"""The forwarding front: plain requests in, one answer each, through the front that generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.room import Room
from shapeshift.fused_decode.unary import UnaryFront
from tests.fakes import PbUtils, TritonError
from tests.fused_decode.fronts import arguments, ask, told
from tests.fused_decode.toy import ToyRuntime, ids, save_tokenizer
from tests.waiting import wait_for


@pytest.fixture
def toy() -> ToyRuntime:
    return ToyRuntime(slots=4)


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def generate(tmp_path: Path, toy: ToyRuntime) -> Iterator[GenerateFront]:
    """The model that is asked, in a process of its own as far as Triton's side goes."""
    stated = {"max_length": toy.max_length, "checkpoint": save_tokenizer(tmp_path / "toy")}
    front = GenerateFront(PbUtils(), arguments("generate", **stated), partial(Room, load_runtime=lambda *_: toy))
    yield front
    toy.open.set()
    front.close()
    front.loop.check_integrity()
    assert front.loop.slots.used == len(front._live) == 0


@pytest.fixture
def make_front(pb_utils: PbUtils, generate: GenerateFront, toy: ToyRuntime) -> Iterator[Callable[..., UnaryFront]]:
    started: list[UnaryFront] = []
    pb_utils.models["generate"] = generate

    def make(**parameters: object) -> UnaryFront:
        started.append(UnaryFront(pb_utils, arguments("generate_unary", **parameters)))
        return started[-1]

    yield make
    toy.open.set()
    for front in started:
        front.close()
        assert not front._calls and len(front._watch) == 0


def plain(*arguments: Any, **given: Any) -> Any:
    return ask(*arguments, decoupled=False, **given)


def test_an_answer_is_that_of_the_model_that_generates(make_front: Callable[..., UnaryFront], toy: ToyRuntime) -> None:
    request = plain("hello", max_tokens=20, return_finish_reason=True, return_num_output_tokens=True, stream=False)
    make_front().execute([request])
    wanted = {"text_output": toy.text(ids("hello"), 20), "finish_reason": "length", "num_output_tokens": 20}
    assert told(request) == wanted


def test_many_at_once(make_front: Callable[..., UnaryFront], toy: ToyRuntime) -> None:
    front = make_front()
    prompts = [f"prompt {number}" for number in range(40)]
    requests = [plain(prompt, max_tokens=9) for prompt in prompts]
    front.execute(requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert told(request) == {"text_output": toy.text(ids(prompt), 9)}


def test_inputs_and_parameters_reach_the_other_model(
    make_front: Callable[..., UnaryFront], generate: GenerateFront, toy: ToyRuntime
) -> None:
    whole = toy.text(ids("abc"), 8)
    stopped = plain(stop=[whole[4:6], "~~"])
    seeded = [plain(temperature=1.0, seed=3, max_tokens=20) for _ in range(2)]
    late = plain(parameters={"latency_ms": 1e-6})
    front = make_front()
    toy.open.clear()
    front.execute([stopped])
    wait_for(lambda: toy.entered.acquire(blocking=False))
    front.execute([*seeded, late])
    wait_for(lambda: len(generate.loop.admission) == 3 and generate.loop._departures._timed)
    toy.open.set()
    assert told(stopped)["text_output"] == whole[: whole.index(whole[4:6])]
    assert told(seeded[0]) == told(seeded[1])
    assert late.refusal()[0] == TritonError.UNAVAILABLE


def test_errors_keep_their_code_and_text(make_front: Callable[..., UnaryFront]) -> None:
    front = make_front()
    bad, unknown = plain(max_tokens=0), plain(None, stop_id="x")
    front.execute([bad, unknown])
    assert bad.refusal() == (TritonError.INVALID_ARG, "max_tokens: got 0; a whole number at least 1")
    assert unknown.refusal() == (TritonError.NOT_FOUND, "stop_id: no request 'x' waits or runs")


def test_a_stream_is_refused(make_front: Callable[..., UnaryFront]) -> None:
    request = plain(stream=True)
    make_front().execute([request])
    code, text = request.refusal()
    assert code == TritonError.INVALID_ARG and text.startswith("stream: got True; false")


def test_without_the_other_model(make_front: Callable[..., UnaryFront], pb_utils: PbUtils) -> None:
    del pb_utils.models["generate"]
    request = plain()
    make_front().execute([request])
    assert request.refusal() == (TritonError.UNAVAILABLE, "Model 'generate' is not ready.")


def test_a_caller_who_vanishes_stops_the_other_model(
    make_front: Callable[..., UnaryFront], generate: GenerateFront, toy: ToyRuntime
) -> None:
    toy.open.clear()
    front = make_front()
    gone, stays = plain(max_tokens=60), plain(max_tokens=20)
    front.execute([gone, stays])
    wait_for(lambda: toy.entered.acquire(blocking=False))
    gone.sender.cancelled = True
    wait_for(lambda: generate.loop._departures._demanded)
    toy.open.set()
    assert len(told(gone)["text_output"]) < 60
    assert told(stays)["text_output"] == toy.text(ids("abc"), 20)


def test_a_caller_who_vanishes_before_the_other_model_has_heard(
    make_front: Callable[..., UnaryFront], generate: GenerateFront, toy: ToyRuntime, pb_utils: PbUtils
) -> None:
    toy.open.clear()
    gate = threading.Event()

    class Slow:
        def execute(self, requests: list[Any]) -> None:
            if "stop_id" not in requests[0].inputs:
                assert gate.wait(30)
            generate.execute(requests)

    pb_utils.models["generate"] = Slow()
    front = make_front()
    request = plain(max_tokens=60)
    front.execute([request])
    request.sender.cancelled = True
    wait_for(lambda: len(front._watch) == 0)
    wait_for(lambda: len(front._watch) == 1)
    gate.set()
    wait_for(lambda: toy.entered.acquire(blocking=False))
    wait_for(lambda: generate.loop._departures._demanded)
    toy.open.set()
    assert len(told(request)["text_output"]) < 60


def test_stop_id_ends_requests_under_either_name(
    make_front: Callable[..., UnaryFront], generate: GenerateFront, toy: ToyRuntime
) -> None:
    toy.open.clear()
    front = make_front()
    here = plain(request_id="mine", max_tokens=50, return_finish_reason=True)
    there = ask(request_id="theirs", max_tokens=50, return_finish_reason=True)
    front.execute([here])
    generate.execute([there])
    wait_for(lambda: len(generate._live) == 2)
    stops = [plain(None, stop_id="mine"), plain(None, stop_id="theirs")]
    front.execute(stops)
    assert [told(stop) for stop in stops] == [{"text_output": ""}] * 2
    toy.open.set()
    assert told(here)["finish_reason"] == told(there)["finish_reason"] == "abort"


def test_beyond_what_may_be_under_way(make_front: Callable[..., UnaryFront], toy: ToyRuntime) -> None:
    toy.open.clear()
    front = make_front(forward_requests=2)
    served = [plain(), plain()]
    refused = plain()
    front.execute([*served, refused])
    assert refused.refusal() == (
        TritonError.UNAVAILABLE,
        "forward_requests: 2 requests are under way, no more may be; retry later",
    )
    toy.open.set()
    for request in served:
        told(request)


def test_metrics(make_front: Callable[..., UnaryFront], pb_utils: PbUtils) -> None:
    front = make_front()
    good, bad = plain(), plain("")
    front.execute([good, bad])
    told(good)
    bad.refusal()
    front.close()
    assert pb_utils.metric("shapeshift_requests_total", code="OK") == 1
    assert pb_utils.metric("shapeshift_requests_total", code="INVALID_ARG") == 1
    assert pb_utils.metric("shapeshift_request_latency_ms_count") == 1
    assert pb_utils.metric("shapeshift_requests_running") == 0


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"forward_to": ""}, "forward_to: got ''; the name of a model"),
        ({"forward_requests": 0}, "forward_requests: got 0; 1 to 4096"),
        ({"checkpoint": "x"}, "checkpoint: got 'checkpoint'; unknown parameter; known: forward_requests, forward_to"),
    ],
)
def test_what_cannot_be_meant_is_not_loaded(pb_utils: PbUtils, parameters: dict[str, object], said: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(InvalidInputError, match=said):
        UnaryFront(pb_utils, arguments("generate_unary", **parameters))
    assert set(threading.enumerate()) <= before


def test_both_models_have_the_same_inputs_and_outputs() -> None:
    one, other = arguments("generate").config, arguments("generate_unary").config
    assert one["input"] == other["input"] and one["output"] == other["output"]
