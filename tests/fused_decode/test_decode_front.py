"""The front from Triton's request to its responses, over a toy model."""

from __future__ import annotations

import json
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from shapeshift.errors import EngineError, InvalidInputError, NotFoundError
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.job import GenerateJob
from shapeshift.serving.front import Affinity
from tests.fakes import FINAL, PbUtils, Request, TritonError, values_of
from tests.fused_decode.fronts import OUTPUTS, MakeFront, answer_of, ask, text_of
from tests.fused_decode.toy import LETTERS, ToyRuntime, ids, save_tokenizer
from tests.waiting import wait_for

# Answers.


def test_one_response_holds_the_whole_answer(make_front: MakeFront, toy: ToyRuntime) -> None:
    request = ask("hello", max_tokens=20)
    make_front().execute([request])
    assert answer_of(request) == {"text_output": toy.text(ids("hello"), 20)}


def test_a_request_without_inputs_is_told_what_the_model_is(make_front: MakeFront, toy: ToyRuntime) -> None:
    asked = ask(None, outputs=(*OUTPUTS, "DESCRIPTION"))
    named = ask("hello", outputs=("DESCRIPTION",))
    bad = ask(None, max_tokens=3, outputs=(*OUTPUTS, "DESCRIPTION"))
    make_front().execute([asked, named, bad])
    told = json.loads(values_of(asked.sender.answer())["DESCRIPTION"].item())
    assert told == json.loads(values_of(named.sender.answer())["DESCRIPTION"].item())
    assert told["kind"] == "generation" and told["max_tokens"] == toy.max_length
    assert told["stream"] == "generate" and "unary" not in told and "chat_template" not in told
    assert bad.refusal()[1].startswith("text_input: got None")


def test_the_chat_template_of_the_checkpoint_is_told(make_front: MakeFront, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "a", "eos_token": "b"}))
    asked = ask(None, outputs=("DESCRIPTION",))
    make_front(checkpoint=folder).execute([asked])
    told = json.loads(values_of(asked.sender.answer())["DESCRIPTION"].item())
    assert told["chat_template"] == "{{ bos_token }}" and "tool_use_template" not in told
    assert told["special_tokens"] == {"bos_token": "a", "eos_token": "b"}


def test_the_form_of_tool_calls_is_told_where_it_is_stated(make_front: MakeFront) -> None:
    asked = ask(None, outputs=("DESCRIPTION",))
    make_front(tool_parser="mistral").execute([asked])
    assert json.loads(values_of(asked.sender.answer())["DESCRIPTION"].item())["tool_parser"] == "mistral"
    with pytest.raises(InvalidInputError, match="tool_parser: got 'mistrall'"):
        make_front(tool_parser="mistrall")


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_in_the_text_on_request(
    make_front: MakeFront, toy: ToyRuntime, tmp_path: Path, stream: bool
) -> None:
    whole = toy.text(ids("abc"), 20)
    folder = save_tokenizer(tmp_path / "special")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([whole[3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    front = make_front(checkpoint=folder)
    for sampling, text in (({}, whole.replace(whole[3], "")), ({"skip_special_tokens": False}, whole)):
        request = ask("abc", max_tokens=20, stream=stream, sampling_parameters=json.dumps(sampling))
        front.execute([request])
        responses = request.sender.stream() if stream else [request.sender.answer()]
        assert "".join(map(text_of, responses)) == text


@pytest.mark.parametrize(("last", "ends"), [("token", True), ("tw", False), (None, False)])
def test_an_answer_ends_at_the_tokenizers_last_token(
    make_front: MakeFront, toy: ToyRuntime, tmp_path: Path, last: str | None, ends: bool
) -> None:
    whole = toy.text(ids("abc"), 20)
    folder = save_tokenizer(tmp_path / "chat")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": whole[3] if last == "token" else last}))
    request = ask("abc", max_tokens=20)
    make_front(checkpoint=folder).execute([request])
    assert answer_of(request)["text_output"] == (whole[: whole.index(whole[3])] if ends else whole)


def test_a_stream_has_the_same_text_piece_by_piece(make_front: MakeFront, toy: ToyRuntime) -> None:
    request = ask("hello", max_tokens=20, stream=True)
    toy.pace = threading.Semaphore(0)
    make_front().execute([request])
    for count in range(1, 21):
        toy.pace.release()
        wait_for(lambda: len(request.sender.responses) == count)  # noqa: B023
    message = [text_of(response) for response in request.sender.stream()]
    assert "".join(message) == toy.text(ids("hello"), 20)
    assert [len(text) for text in message] == [1] * 20


def affinity_of(front: GenerateFront) -> Affinity:
    assert front.affinity is not None
    return front.affinity


def test_a_prompt_is_unread_until_its_first_token(make_front: MakeFront, toy: ToyRuntime) -> None:
    requests = [ask("hello", max_tokens=20, stream=True), ask("goodbye", max_tokens=20, stream=True)]
    toy.pace = threading.Semaphore(0)
    front = make_front()
    assert affinity_of(front).unread_tokens() == 0
    front.execute(requests)
    assert affinity_of(front).unread_tokens() == len("hello") + len("goodbye")
    while any(not request.sender.responses for request in requests):
        toy.pace.release()
        time.sleep(0.005)
    assert affinity_of(front).unread_tokens() == 0
    toy.pace.release(100)
    for request in requests:
        request.sender.stream()


def test_the_tokens_of_a_prompt_are_known_about_before_it_is_parsed(make_front: MakeFront) -> None:
    front = make_front()
    assert affinity_of(front).prompt_tokens(ask("x" * 40)) == 10
    assert affinity_of(front).prompt_tokens(ask(None, input_ids=[1, 2, 3])) == 3
    assert affinity_of(front).prompt_tokens(ask(None)) == 0


def test_text_for_a_slow_client_is_merged(make_front: MakeFront, toy: ToyRuntime) -> None:
    request, gate, held = ask("hello", max_tokens=40, stream=True), threading.Event(), threading.Event()
    send = request.sender.send

    def slow(response: Any, flags: int = 0) -> None:
        held.set()
        assert gate.wait(120)
        send(response, flags)

    request.sender.send = slow  # type: ignore[method-assign]
    toy.pace = threading.Semaphore(1)
    front = make_front()
    front.execute([request])
    (live,) = front.live
    assert held.wait(120)
    toy.pace.release(39)
    wait_for(lambda: live.is_finished)
    gate.set()
    assert len(request.sender.stream()) == 2
    assert "".join(map(text_of, request.sender.responses)) == toy.text(ids("hello"), 40)


def test_further_outputs_on_request(make_front: MakeFront) -> None:
    flags: dict[str, Any] = {
        f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "timings")
    }
    request = ask("hello", max_tokens=5, request_id="mine", return_request_id=True, **flags)
    make_front().execute([request])
    answer = answer_of(request)
    assert {name: answer[name] for name in ("finish_reason", "num_input_tokens", "num_output_tokens")} == {
        "finish_reason": "length",
        "num_input_tokens": 5,
        "num_output_tokens": 5,
    }
    assert answer["request_id"] == "mine"
    assert all(answer[f"{part}_ms"] >= 0 for part in ("queue", "prefill", "decode"))


def test_logprobs_are_asked_for_no_longer_than_their_request_runs(make_front: MakeFront) -> None:
    """A step in which none are wanted has one operation only."""
    front = make_front()
    front.execute([request := ask(logprobs=2)])
    answer_of(request)
    wait_for(lambda: not front.loop.slots.sampling.listing)
    front.loop.check_integrity()


def test_tokens_of_a_prompt_that_were_computed_before_are_told(make_front: MakeFront) -> None:
    front, counts = make_front(), []
    for text in ("a beginning of several blocks, x", "a beginning of several blocks, y"):
        request = ask(text, max_tokens=2, return_num_input_tokens=True)
        front.execute([request])
        counts.append((answer_of(request)["num_input_tokens"], answer_of(request)["num_cached_tokens"]))
    length = len("a beginning of several blocks, x")
    assert counts == [(length, 0), (length, 16)]


def test_counts_of_a_stream_add_up_and_the_reason_comes_last(make_front: MakeFront) -> None:
    request = ask(max_tokens=9, stream=True, return_num_output_tokens=True, return_finish_reason=True)
    make_front().execute([request])
    values = [values_of(response) for response in request.sender.stream()]
    assert sum(int(each["num_output_tokens"][0]) for each in values) == 9
    assert ["finish_reason" in each for each in values] == [False] * (len(values) - 1) + [True]


def test_what_a_client_ends_an_answer_with_is_named(make_front: MakeFront, toy: ToyRuntime) -> None:
    said = toy.text(ids("hello"), 20)
    flags: dict[str, Any] = {"return_finish_reason": True, "max_tokens": 20}
    by_text = ask("hello", stop=["nowhere", said[3:6]], **flags)
    by_token = ask("hello", stop_token_ids=[LETTERS.index(said[4])], **flags)
    by_length = ask("hello", stop=["nowhere"], **flags)
    streamed = ask("hello", stop=[said[3:6]], stream=True, **flags)
    front = make_front()
    front.execute([by_text, by_token, by_length, streamed])
    assert json.loads(answer_of(by_text)["stop_reason"]) == said[3:6]
    assert json.loads(answer_of(by_token)["stop_reason"]) == LETTERS.index(said[4])
    assert "stop_reason" not in answer_of(by_length)
    *_, last = [values_of(response) for response in streamed.sender.stream()]
    assert json.loads(last["stop_reason"].item()) == said[3:6]


def test_the_end_of_sequence_is_nothing_that_a_client_named(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.eos_at = 8
    request = ask("hello", max_tokens=20, stop=["nowhere"], return_finish_reason=True)
    make_front().execute([request])
    answer = answer_of(request)
    assert answer["finish_reason"] == "stop" and "stop_reason" not in answer


def test_prompts_become_tokens_and_tokens_text(make_front: MakeFront, toy: ToyRuntime) -> None:
    texts = Request(("TOKENS",), text_input=np.array([b"hello", b"a" * 99], dtype=object))
    lengths = np.array([5, 2], np.int32)
    tokens = Request(("TOKENS",), input_ids=np.array([*ids("hello"), *ids("ab")], np.int32), input_lengths=lengths)
    wrong = Request(("TOKENS",), input_ids=np.array([10**6], np.int32))
    make_front().execute([texts, tokens, wrong])
    first, long = (json.loads(row) for row in values_of(texts.sender.answer())["TOKENS"])
    assert (first["text"], first["ids"], first["tokens"]) == ("hello", list(ids("hello")), list("hello"))
    assert len(long["ids"]) == 99 > toy.max_length, "more than the model reads"
    said = [json.loads(row)["text"] for row in values_of(tokens.sender.answer())["TOKENS"]]
    assert said == ["hello", "ab"] and not toy.steps
    assert wrong.refusal()[1].startswith("input_ids: got 1000000; 0 to ")


def test_outputs_are_the_requested_ones(make_front: MakeFront) -> None:
    front = make_front()
    only = ask(outputs=("finish_reason",), return_finish_reason=True)
    none = ask(outputs=())
    front.execute([only, none])
    assert list(answer_of(only)) == ["finish_reason"] and answer_of(none) == {}


def test_the_prompt_can_be_repeated(make_front: MakeFront, toy: ToyRuntime) -> None:
    request = ask("hello", exclude_input_in_output=False)
    make_front().execute([request])
    assert answer_of(request)["text_output"] == "hello" + toy.text(ids("hello"), 8)


def test_a_request_without_an_id_gets_one(make_front: MakeFront) -> None:
    front = make_front()
    requests = [ask(return_request_id=True) for _ in range(2)] + [ask(return_request_id=True, parameters={"id": "x"})]
    front.execute(requests)
    names = [answer_of(request)["request_id"] for request in requests]
    assert len(set(names)) == 3 and names[2] == "x" and all(names)


def test_the_same_seed_gives_the_same_text(make_front: MakeFront) -> None:
    front = make_front()
    seeded = [ask(temperature=1.0, max_tokens=30, seed=5) for _ in range(2)]
    others = [ask(temperature=1.0, max_tokens=30) for _ in range(2)]
    front.execute([*seeded, *others])
    texts = [answer_of(request)["text_output"] for request in [*seeded, *others]]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_many_at_once(make_front: MakeFront, toy: ToyRuntime) -> None:
    front, rng = make_front(), random.Random(0)
    prompts = ["".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 30))) for _ in range(80)]
    requests = [ask(prompt, max_tokens=rng.randint(1, 20), stream=rng.random() < 0.5) for prompt in prompts]
    for start in range(0, len(requests), 9):
        front.execute(requests[start : start + 9])
    for request, prompt in zip(requests, prompts, strict=True):
        count = int(request.tensors["max_tokens"].as_numpy()[0])
        assert "".join(map(text_of, request.sender.stream())) == toy.text(ids(prompt), count)


# Refusals.

REFUSED: list[tuple[Request, str]] = [
    (ask(""), "text_input: got ''; at least one character"),
    (ask(b"\xff\xfe"), "text_input: got b'\\xff\\xfe'; valid UTF-8 (byte 0 is not)"),
    (ask("a" * 64), "text_input: got '64 tokens'; at most 63, one less than max_length (64)"),
    (ask("a" * 100_000), "text_input: got '100000 bytes'; at most 8064 bytes, one less than max_length (64)"),
    (ask(max_tokens=0), "max_tokens: got 0; a whole number at least 1"),
    (ask(top_k=10_000), f"top_k: got 10000; a whole number at least -1 and at most {len(LETTERS) + 1}"),
    (ask(temperature=float("nan")), "temperature: got nan"),
    (ask(sampling_parameters="{"), "sampling_parameters: got '{'; JSON"),
    (ask(parameters={"truncate": True}), "parameter truncate: got True; unknown parameter"),
    (ask(parameters={"latency_ms": -1}), "parameter latency_ms: got -1; above 0"),
    (ask(stop_id="x"), "stop_id: got 'x'; alone, without text_input"),
]


def test_an_invalid_request_costs_no_other(make_front: MakeFront, toy: ToyRuntime) -> None:
    front = make_front()
    good = [ask("first"), ask("second")]
    front.execute([good[0], *(request for request, _ in REFUSED), good[1]])
    for request, text in zip(good, ("first", "second"), strict=True):
        assert answer_of(request)["text_output"] == toy.text(ids(text), 8)
    for request, message in REFUSED:
        code, text = request.refusal()
        assert code == TritonError.INVALID_ARG
        assert text.startswith(message)


def test_a_token_that_the_model_lacks_costs_no_other_request(
    make_front: MakeFront, toy: ToyRuntime, tmp_path: Path
) -> None:
    unresized = save_tokenizer(tmp_path / "unresized", added=("<pad>",))
    with pytest.raises(InvalidInputError, match="tokenizer.json: got 'id .*set extra_tokens to true"):
        make_front(checkpoint=unresized)
    front = make_front(checkpoint=unresized, extra_tokens="true")
    toy.open.clear()
    running = [ask("first"), ask("second")]
    front.execute(running)
    assert toy.entered.acquire(timeout=30)
    bad, last = ask("a<pad>b"), ask("a<|end|>b")
    front.execute([bad, last])
    toy.open.set()
    code, text = bad.refusal()
    assert code == TritonError.INVALID_ARG
    limit = len(LETTERS) + 1
    assert text == f"text_input: got '<pad>'; tokens that the model has: {limit} is not below its vocab_size ({limit})"
    for request, prompt in zip(running, ("first", "second"), strict=True):
        assert answer_of(request)["text_output"] == toy.text(ids(prompt), 8)
    answer_of(last)


def test_a_request_that_breaks_our_own_code_gets_an_error(make_front: MakeFront) -> None:
    front = make_front()
    broken, good = ask(), ask()
    broken.tensors["text_input"] = object()  # type: ignore[assignment]
    front.execute([broken, good])
    assert broken.refusal()[0] == TritonError.INTERNAL
    answer_of(good)


def test_a_full_queue_is_unavailable_at_once(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.open.clear()
    front = make_front(queue_requests=20)
    front.execute([ask()])
    assert toy.entered.acquire(timeout=30)
    requests = [ask() for _ in range(10_000)]
    front.execute(requests)
    for request in requests[20:]:
        code, text = request.refusal()
        assert code == TritonError.UNAVAILABLE and "1 more would exceed 20; retry later" in text
    assert not any(request.sender.responses for request in requests[:20])
    toy.open.set()
    for request in requests[:20]:
        answer_of(request)


# Early ends.


def test_stop_id_ends_that_request(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.open.clear()
    front = make_front()
    ends, stays = ask(request_id="one", max_tokens=50, return_finish_reason=True), ask(request_id="two", max_tokens=50)
    front.execute([ends, stays])
    assert toy.entered.acquire(timeout=30)
    stop, unknown = ask(None, stop_id="one"), ask(None, stop_id="three")
    front.execute([stop, unknown])
    assert unknown.refusal() == (TritonError.NOT_FOUND, "stop_id: no request 'three' waits or runs")
    assert answer_of(stop) == {"text_output": ""}
    toy.open.set()
    assert answer_of(ends)["finish_reason"] == "abort"
    assert len(answer_of(stays)["text_output"]) == 50
    again = ask(None, stop_id="one")
    front.execute([again])
    assert again.refusal()[0] == TritonError.NOT_FOUND


def test_stop_id_ends_all_requests_of_that_id(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.open.clear()
    front = make_front()
    requests = [ask(request_id="one", max_tokens=50, return_finish_reason=True) for _ in range(5)]
    front.execute(requests)
    front.execute([ask(None, stop_id="one")])
    toy.open.set()
    assert {answer_of(request)["finish_reason"] for request in requests} == {"abort"}


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_requests_free_their_slots(make_front: MakeFront, toy: ToyRuntime, stream: bool) -> None:
    toy.open.clear()
    front = make_front()
    gone = [ask(max_tokens=60, stream=stream) for _ in range(5)]
    stays = ask(max_tokens=20)
    front.execute([*gone, stays])
    assert toy.entered.acquire(timeout=30)
    for request in gone:
        request.sender.cancelled = True
    wait_for(lambda: len(front.loop.terminations.demanded) == 5)
    toy.open.set()
    for request in gone:
        error = request.sender.stream()[-1].error()
        assert error is not None and error.code() == TritonError.CANCELLED
    assert answer_of(stays)["text_output"] == toy.text(ids("abc"), 20)


@pytest.mark.parametrize("stream", [False, True])
def test_no_request_is_watched_once_its_last_response_is_sent(make_front: MakeFront, stream: bool) -> None:
    """A question about it after that ends the server."""
    front = make_front(queue_requests=2)
    watched: list[str] = []
    requests = [ask(stream=stream, request_id=str(number)) for number in range(4)] + [ask("")]

    def send(request: Request, response: Any, flags: int = 0) -> None:
        if flags == FINAL:
            jobs: list[Any] = list(front.watch._watched)
            watched.extend(one.id for job in jobs for one in job.requests if one.id == request.request_id())
        own_send[request](response, flags)

    own_send = {request: request.sender.send for request in requests}
    for request in requests:
        request.sender.send = partial(send, request)  # type: ignore[method-assign]
    front.execute(requests)
    for request in requests:
        request.sender.stream()
    assert watched == []


class Mute(GenerateFront):
    """Makes no response."""

    def respond(self, job: GenerateJob) -> Any:
        raise EngineError("no response")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_made_is_an_error_and_ends_the_request(make_front: MakeFront, stream: bool) -> None:
    front, request = make_front(Mute), ask(max_tokens=60, stream=stream)
    front.execute([request])
    (response,) = request.sender.stream()
    error = response.error()
    assert error is not None and error.message() == "no response"
    wait_for(lambda: not front.live and front.loop.slots.used == 0)
    answered = {code: counter.value for code, counter in front.request_metrics.answered.items() if counter.value}
    assert answered == {"INTERNAL": 1} and len(front.watch) == 0


def test_a_response_that_cannot_be_sent_ends_the_request(make_front: MakeFront, toy: ToyRuntime) -> None:
    front = make_front()
    lost, stays = ask(max_tokens=60, stream=True, request_id="lost"), ask(max_tokens=60, stream=True)
    lost.sender._fail = RuntimeError("gone")
    toy.pace = threading.Semaphore(2)
    front.execute([lost, stays])
    wait_for(lambda: front.loop.terminations.demanded or "lost" not in [one.id for one in front.live])
    toy.pace.release(100)
    stays.sender.stream()
    wait_for(lambda: not front.live)
    assert front.loop.metrics.generated_tokens.value < 120


def test_a_deadline_before_the_first_token(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.open.clear()
    front = make_front()
    first = ask(max_tokens=5)
    front.execute([first])
    assert toy.entered.acquire(timeout=30)
    waits = [ask(parameters={"latency_ms": 20}) for _ in range(3)]
    front.execute(waits)
    time.sleep(0.03)
    toy.open.set()
    for request in waits:
        code, text = request.refusal()
        assert code == TritonError.UNAVAILABLE and text.startswith("latency_ms ran out before the first token")
    answer_of(first)


# Failures.


def test_a_failure_of_the_model_costs_the_running_requests_only(
    make_front: MakeFront, toy: ToyRuntime, pb_utils: PbUtils
) -> None:
    front = make_front()
    toy.fail = RuntimeError("no more memory")
    lost = ask(stream=True)
    front.execute([lost])
    error = lost.sender.stream()[-1].error()
    assert error is not None and error.code() == TritonError.INTERNAL and "no more memory" in error.message()
    toy.fail = None
    good = ask()
    front.execute([good])
    answer_of(good)
    assert any("no more memory" in line for line in pb_utils.Logger.lines)


def test_close_answers_all_requests_and_ends_all_threads(make_front: MakeFront, toy: ToyRuntime) -> None:
    before = set(threading.enumerate())
    toy.open.clear()
    front = make_front()
    requests = [ask(max_tokens=60, stream=True) for _ in range(9)]
    front.execute(requests)
    assert toy.entered.acquire(timeout=30)
    closing = threading.Thread(target=front.close)
    closing.start()
    wait_for(lambda: front.loop.is_closing)
    toy.open.set()
    closing.join(30)
    for request in requests:
        error = request.sender.stream()[-1].error()
        assert error is not None and error.code() == TritonError.UNAVAILABLE
    assert set(threading.enumerate()) <= before
    assert toy.is_closed


# Metrics.


def test_metrics(make_front: MakeFront, pb_utils: PbUtils) -> None:
    began = time.monotonic()
    front = make_front()
    good, bad, unknown = ask("a" * 9, max_tokens=7), ask(""), ask(None, stop_id="x")
    front.execute([good, bad, unknown])
    for request in (good, bad, unknown):
        request.sender.answer()
    front.close()
    count = pb_utils.metric
    codes = {code: count("shapeshift_requests_total", code=code) for code in ("OK", "INVALID_ARG", "NOT_FOUND")}
    assert codes == {"OK": 1, "INVALID_ARG": 1, "NOT_FOUND": 1}
    assert count("shapeshift_request_tokens_bucket", le="8") == 0
    assert count("shapeshift_request_tokens_bucket", le="16") == 1
    assert count("shapeshift_request_latency_ms_count") == 1
    assert 0 < count("shapeshift_request_latency_ms_sum") <= (time.monotonic() - began) * 1e3
    assert count("shapeshift_prompt_tokens_total") == 9
    assert count("shapeshift_generated_tokens_total") == 7
    assert count("shapeshift_iteration_ms_count") == 7
    assert count("shapeshift_first_token_ms_count") == 1
    assert count("shapeshift_between_tokens_ms_count") == 6
    assert count("shapeshift_slots") == 3
    for gauge in ("requests_waiting", "requests_running", "slot_tokens"):
        assert count(f"shapeshift_{gauge}") == 0
    assert all(("model", "generate") in labels for _, labels in pb_utils.metrics)


# What is not loaded at all.


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        (
            {"max_concurency": 3},
            InvalidInputError,
            "max_concurency: .*; did you mean max_concurrency. known: ",
        ),
        ({"max_concurrency": 0}, InvalidInputError, "max_concurrency: got 0; 1 to 4096"),
        ({"max_length": 1}, InvalidInputError, "max_length: got 1; 2 to 1048576"),
        ({"precision": "f8"}, InvalidInputError, "precision: got 'f8'; one of auto, f32, bf16"),
        ({"prefill_tokens": "many"}, InvalidInputError, "prefill_tokens: got 'many'; must be a whole number"),
        ({"checkpoint": "/nowhere"}, NotFoundError, "checkpoint: no folder /nowhere"),
    ],
)
def test_an_invalid_parameter_is_refused_at_load(
    make_front: MakeFront, parameters: dict[str, object], error: type[Exception], message: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error, match=message):
        make_front(**parameters)
    assert set(threading.enumerate()) <= before


def test_a_changed_checkpoint_is_refused_at_load(make_front: MakeFront, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "toy")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"none")
    with pytest.raises(EngineError, match="has changed; run `shapeshift engines`"):
        make_front(checkpoint_sha256="0" * 64)


# Parameters that change logits, from the request to the text.


def test_biases_bad_words_and_penalties_change_the_text(make_front: MakeFront, toy: ToyRuntime) -> None:
    plain = toy.text(ids("abc"), 8)
    letter = plain[3]
    front = make_front()
    biased = ask(logit_bias=json.dumps({LETTERS.index("q"): 100}))
    without = ask(bad_words=[letter])
    spread = ask(max_tokens=40, presence_penalty=2.0, frequency_penalty=2.0)
    front.execute([biased, without, spread, alone := ask(max_tokens=40)])
    assert answer_of(biased)["text_output"] == "q" * 8
    text = answer_of(without)["text_output"]
    assert letter not in text and text[:3] == plain[:3]
    repeated = answer_of(alone)["text_output"]
    assert repeated == toy.text(ids("abc"), 40)
    assert len(set(answer_of(spread)["text_output"])) > len(set(repeated))


def test_a_line_of_the_log_counts_tokens(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front(log_requests=1)
    good, ended = ask("hello", max_tokens=20, parameters={"id": "r1", "slo_class": "batch"}), ask("hello", n=0)
    front.execute([good, ended])
    answer_of(good)
    answered, refused = sorted(pb_utils.Logger.requests(2), key=lambda line: line["outcome"], reverse=True)
    assert (answered["id"], answered["slo_class"], answered["finish_reason"]) == ("r1", "batch", "length")
    assert (answered["tokens"], answered["generated"]) == (len(ids("hello")), 20)
    assert answered["queue_ms"] >= 0 and answered["compute_ms"] > 0
    assert (answered["outcome"], refused["outcome"]) == ("OK", "INVALID_ARG")
