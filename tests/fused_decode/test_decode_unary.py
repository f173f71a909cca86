"""The front that forwards: plain requests in, one answer each, through the front that generates."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError, OverloadedError
from shapeshift.fused_decode import loading, unary
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.unary import UnaryFront
from shapeshift.triton.async_client import ModelCall, Tensors
from tests.fakes import PbUtils, TritonError, as_served, logger, values_of
from tests.fused_decode.fake_client import FakeClient
from tests.fused_decode.fronts import answer_of, arguments, ask
from tests.fused_decode.toy import ToyRuntime, ids, save_tokenizer
from tests.waiting import wait_for


@pytest.fixture
def toy() -> ToyRuntime:
    return ToyRuntime(slots=4)


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def client(pb_utils: PbUtils) -> FakeClient:
    return FakeClient(pb_utils)


@pytest.fixture
def generate(tmp_path: Path, toy: ToyRuntime) -> Iterator[GenerateFront]:
    """The model that generates, with its own fake of Triton."""
    stated = {"max_length": toy.max_length, "checkpoint": save_tokenizer(tmp_path / "toy")}
    args = arguments("generate", **stated)
    front = GenerateFront(PbUtils(), args, loading.load(args, logger(), lambda *_: toy))
    yield front
    toy.open.set()
    front.close()
    front.loop.check_integrity()
    assert front.loop.slots.used == len(front.live) == 0


@pytest.fixture
def make_front(
    pb_utils: PbUtils, generate: GenerateFront, toy: ToyRuntime, client: FakeClient
) -> Iterator[Callable[..., UnaryFront]]:
    started: list[UnaryFront] = []
    pb_utils.models["generate"] = generate

    def make(**parameters: object) -> UnaryFront:
        started.append(as_served(UnaryFront(pb_utils, arguments("generate_unary", **parameters), client)))
        return started[-1]

    yield make
    toy.open.set()
    for front in started:
        front.close()
        assert front.load() == 0 and len(front.watch) == 0


def plain(*arguments: Any, **given: Any) -> Any:
    return ask(*arguments, decoupled=False, **given)


def test_the_answer_is_that_of_the_model_that_generates(make_front: Callable[..., UnaryFront], toy: ToyRuntime) -> None:
    request = plain("hello", max_tokens=20, return_finish_reason=True, return_num_output_tokens=True, stream=False)
    make_front().execute([request])
    wanted = {"text_output": toy.text(ids("hello"), 20), "finish_reason": "length", "num_output_tokens": 20}
    assert answer_of(request) == wanted


def test_a_request_without_inputs_is_told_what_both_models_are(make_front: Callable[..., UnaryFront]) -> None:
    asked = plain(None, outputs=("text_output", "DESCRIPTION"))
    make_front().execute([asked])
    told = json.loads(values_of(asked.sender.answer())["DESCRIPTION"].item())
    assert told["kind"] == "generation"
    assert (told["model"], told["unary"], told["stream"]) == ("generate_unary", "generate_unary", "generate")


def test_several_answers_are_rows(make_front: Callable[..., UnaryFront], toy: ToyRuntime) -> None:
    front = make_front()
    flags: dict[str, Any] = {"return_token_ids": True, "return_num_output_tokens": True, "return_logprobs": True}
    request = plain(None, text_input=["abc", "x"], n=2, max_tokens=6, temperature=0.0, logprobs=2, **flags)
    wrong = plain("abc", n=2, best_of=1)
    front.execute([request, wrong])
    values = values_of(request.sender.answer())
    wanted = [toy.text(ids(prompt), 6).encode() for prompt in ("abc", "abc", "x", "x")]
    assert values["text_output"].tolist() == wanted
    assert values["choice_index"].tolist() == [0, 1, 2, 3]
    assert values["token_ids"].shape == values["token_logprobs"].shape == (24,)
    assert values["top_token_ids"].shape == values["top_logprobs"].shape == (24, 2)
    assert values["logprobs"].shape == (4,)
    assert wrong.refusal() == (TritonError.INVALID_ARG, "best_of: got 1; at least n (2)")


def test_many_at_once(make_front: Callable[..., UnaryFront], toy: ToyRuntime) -> None:
    front = make_front()
    prompts = [f"prompt {number}" for number in range(40)]
    requests = [plain(prompt, max_tokens=9) for prompt in prompts]
    front.execute(requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert answer_of(request) == {"text_output": toy.text(ids(prompt), 9)}


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
    wait_for(lambda: len(generate.loop.admission) == 3 and generate.loop.terminations.submitted)
    toy.open.set()
    assert answer_of(stopped)["text_output"] == whole[: whole.index(whole[4:6])]
    assert answer_of(seeded[0]) == answer_of(seeded[1])
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


def test_a_cancelled_request_ends_in_the_other_model(
    make_front: Callable[..., UnaryFront], generate: GenerateFront, toy: ToyRuntime
) -> None:
    toy.open.clear()
    front = make_front()
    gone, stays = plain(max_tokens=60), plain(max_tokens=20)
    front.execute([gone, stays])
    wait_for(lambda: toy.entered.acquire(blocking=False))
    gone.sender.cancelled = True
    wait_for(lambda: generate.loop.terminations.demanded)
    toy.open.set()
    assert gone.refusal() == (TritonError.CANCELLED, "the client cancelled the request")
    assert answer_of(stays)["text_output"] == toy.text(ids("abc"), 20)


def test_a_request_cancelled_before_its_task_has_begun(
    make_front: Callable[..., UnaryFront], client: FakeClient
) -> None:
    front = make_front()
    blocked, release = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        assert release.wait(120)

    # The event loop is busy, so that no task begins.
    front.thread.start(block())
    assert blocked.wait(120)
    request = plain(max_tokens=60)
    front.execute([request])
    request.sender.cancelled = True
    wait_for(lambda: all(call.error for call in front.calls))
    release.set()
    assert request.refusal()[0] == TritonError.CANCELLED
    assert client.calls == [], "the other model never saw it"


@pytest.mark.parametrize(
    "sign", ["Stub process 'generate_0' is not healthy.", "Failed to process the request(s), unexpected termination"]
)
def test_requests_that_a_dead_process_held_fail_soon(
    make_front: Callable[..., UnaryFront], client: FakeClient, sign: str
) -> None:
    client.dead["generate"] = sign
    requests = [plain(max_tokens=60) for _ in range(5)]
    front = make_front()
    front.execute(requests)
    for request in requests:
        assert request.refusal() == (TritonError.UNAVAILABLE, "model generate has died; retry later")
    client.dead.clear()
    again = plain()
    front.execute([again])
    assert answer_of(again)["text_output"], "it is forwarded again once the model is back"


def test_a_model_that_never_answers_fails_its_requests(
    make_front: Callable[..., UnaryFront], client: FakeClient
) -> None:
    probes: list[ModelCall] = []

    async def stuck(call: ModelCall) -> Tensors:
        if "stop_id" in call.inputs:
            probes.append(call)
            raise OverloadedError("no answer")
        await asyncio.sleep(60)
        raise AssertionError

    client.answer = stuck
    request, front = plain(), make_front()
    front.probe_period_s = 0.05
    front.execute([request])
    assert request.refusal() == (TritonError.UNAVAILABLE, "model generate has died; retry later")
    # A model that is slow is not dead.
    assert len(probes) == unary.FAILED_PROBES


def test_every_request_ends_within_its_limit(
    make_front: Callable[..., UnaryFront], toy: ToyRuntime, generate: GenerateFront
) -> None:
    toy.open.clear()
    request = plain()
    make_front(forward_timeout_s=0.3).execute([request])
    code, text = request.refusal()
    assert code == TritonError.UNAVAILABLE and "no answer within 0.3 s" in text


def test_close_answers_what_is_in_flight(pb_utils: PbUtils, client: FakeClient, generate: GenerateFront) -> None:
    pb_utils.models["generate"] = generate
    client.dead["generate"] = "not ready"
    front = as_served(UnaryFront(pb_utils, arguments("generate_unary"), client))
    requests = [plain() for _ in range(3)]
    front.execute(requests)
    front.stop(timeout_s=0.1)
    front.close()
    for request in requests:
        assert request.refusal()[0] == TritonError.UNAVAILABLE


def test_stop_id_ends_requests_of_both_models(
    make_front: Callable[..., UnaryFront], generate: GenerateFront, toy: ToyRuntime
) -> None:
    toy.open.clear()
    front = make_front()
    here = plain(request_id="mine", max_tokens=50, return_finish_reason=True)
    there = ask(request_id="theirs", max_tokens=50, return_finish_reason=True)
    front.execute([here])
    generate.execute([there])
    wait_for(lambda: len(generate.live) == 2)
    stops = [plain(None, stop_id="mine"), plain(None, stop_id="theirs")]
    front.execute(stops)
    assert [answer_of(stop) for stop in stops] == [{"text_output": ""}] * 2
    toy.open.set()
    assert answer_of(here)["finish_reason"] == answer_of(there)["finish_reason"] == "abort"


def test_an_empty_stop_id_stops_nobody(make_front: Callable[..., UnaryFront], toy: ToyRuntime) -> None:
    toy.open.clear()
    front = make_front()
    others = [plain(max_tokens=9), plain(max_tokens=9)]
    front.execute(others)
    stop = plain(None, stop_id="")
    front.execute([stop])
    assert stop.refusal()[0] == TritonError.INVALID_ARG
    toy.open.set()
    assert [len(answer_of(other)["text_output"]) for other in others] == [9, 9]


def test_a_stop_of_its_own_id_and_of_two_requests(
    make_front: Callable[..., UnaryFront], generate: GenerateFront, toy: ToyRuntime
) -> None:
    toy.open.clear()
    front = make_front()
    twins = [plain(request_id="mine", max_tokens=50, return_finish_reason=True) for _ in range(2)]
    front.execute(twins)
    wait_for(lambda: [one.id for one in generate.live] == ["mine"] * 2)
    stop = plain(None, stop_id="mine", request_id="mine")
    front.execute([stop])
    assert answer_of(stop) == {"text_output": ""}
    toy.open.set()
    assert [answer_of(twin)["finish_reason"] for twin in twins] == ["abort", "abort"]


def test_parameters_of_triton_are_not_forwarded(make_front: Callable[..., UnaryFront], client: FakeClient) -> None:
    request = plain(parameters={"timeout": 5, "priority": 1, "binary_data_output": True, "slo_class": "x"})
    make_front().execute([request])
    answer_of(request)
    assert client.calls[-1].parameters == {"slo_class": "x"}


def test_the_request_id_is_the_clients(make_front: Callable[..., UnaryFront]) -> None:
    request = plain(request_id="mine", return_request_id=True)
    make_front().execute([request])
    assert answer_of(request)["request_id"] == "mine"


def test_whatever_the_client_raises_is_an_answer(make_front: Callable[..., UnaryFront], client: FakeClient) -> None:
    failures = []

    async def fail(call: ModelCall) -> Tensors:
        failures.append(call)
        raise ValueError("cannot reshape")

    front = make_front()
    front.probe_period_s = 0.02
    client.answer = fail
    request = plain()
    front.execute([request])
    assert request.refusal() == (TritonError.INTERNAL, "ValueError: cannot reshape")
    assert front.load() == 0 and not front._probing.done(), "the probe goes on"


def test_no_request_is_watched_once_its_response_is_sent(make_front: Callable[..., UnaryFront]) -> None:
    front, watched = make_front(), []
    for request in (good := plain()), (bad := plain(max_tokens=0)):
        send = request.sender.send

        def check(response: Any, flags: int = 0, send: Callable[..., None] = send) -> None:
            watched.append(len(front.watch))
            send(response, flags)

        request.sender.send = check
        front.execute([request])
        request.sender.answer()
    assert answer_of(good)["text_output"] and bad.refusal()[0] == TritonError.INVALID_ARG
    assert watched == [0, 0]


def test_metrics(make_front: Callable[..., UnaryFront], pb_utils: PbUtils) -> None:
    front, began = make_front(), time.monotonic()
    good, bad = plain(), plain("")
    front.execute([good, bad])
    answer_of(good)
    bad.refusal()
    front.close()
    assert pb_utils.metric("shapeshift_requests_total", code="OK") == 1
    assert pb_utils.metric("shapeshift_requests_total", code="INVALID_ARG") == 1
    assert pb_utils.metric("shapeshift_request_latency_ms_count") == 1
    assert 0 < pb_utils.metric("shapeshift_request_latency_ms_sum") <= (time.monotonic() - began) * 1e3
    assert pb_utils.metric("shapeshift_requests_running") == 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"forward_to": ""}, "forward_to: got ''; the name of a model"),
        ({"forward_requests": 9}, "this setting is gone: queue_requests of the model that generates bounds"),
        (
            {"checkpoint": "x"},
            "checkpoint: got 'checkpoint'; unknown parameter; known: forward_timeout_s, forward_to",
        ),
    ],
)
def test_an_invalid_parameter_is_refused_at_load(
    pb_utils: PbUtils, parameters: dict[str, object], message: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(InvalidInputError, match=message):
        UnaryFront(pb_utils, arguments("generate_unary", **parameters))
    assert set(threading.enumerate()) <= before


def test_both_models_have_the_same_inputs_and_outputs() -> None:
    one, other = arguments("generate").config, arguments("generate_unary").config
    assert one["input"] == other["input"] and one["output"] == other["output"]


def test_a_line_of_the_log_says_where_the_request_went(
    make_front: Callable[..., UnaryFront], pb_utils: PbUtils
) -> None:
    front = make_front(log_requests=1)
    request = plain("hello", max_tokens=3, parameters={"id": "r1", "slo_class": "batch"})
    front.execute([request])
    answer_of(request)
    (line,) = pb_utils.Logger.requests(1)
    assert (line["id"], line["slo_class"], line["forward_to"], line["outcome"]) == ("r1", "batch", "generate", "OK")
