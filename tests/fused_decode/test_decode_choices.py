"""Several prompts and several answers in one request, over the toy: its rows, its stream, and how it ends."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.fakes import PbUtils, Request, TritonError, values_of
from tests.fused_decode.fronts import MakeFront, answer_of, ask
from tests.fused_decode.toy import LETTERS, TABLE, ToyRuntime, beams_alone, ids
from tests.waiting import wait_for

RANDOM: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12}


def texts_of(request: Request) -> list[str]:
    return [text.decode() for text in values_of(request.sender.answer())["text_output"]]


def singles(front: Any, prompt: str, seeds: list[int], **given: Any) -> list[str]:
    """What requests with these seeds get alone."""
    requests = [ask(prompt, seed=seed, **{**RANDOM, **given}) for seed in seeds]
    front.execute(requests)
    return [answer_of(request)["text_output"] for request in requests]


def test_samples_are_those_of_requests_with_the_next_seeds(make_front: MakeFront) -> None:
    front = make_front()
    request = ask("hello", n=5, seed=7, **RANDOM)
    front.execute([request])
    texts = texts_of(request)
    assert texts == singles(front, "hello", [7, 8, 9, 10, 11])
    assert len(set(texts)) == 5


def test_prompts_and_their_samples_are_rows(make_front: MakeFront, toy: ToyRuntime) -> None:
    flags: dict[str, Any] = {
        f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "timings")
    }
    request = ask(None, text_input=["abc", "x"], n=2, max_tokens=6, temperature=0.0, return_request_id=True, **flags)
    make_front().execute([request])
    values = values_of(request.sender.answer())
    wanted = [toy.text(ids(prompt), 6) for prompt in ("abc", "abc", "x", "x")]
    assert [text.decode() for text in values["text_output"]] == wanted
    assert values["choice_index"].tolist() == [0, 1, 2, 3]
    assert values["num_input_tokens"].tolist() == [3, 3, 1, 1]
    assert values["num_output_tokens"].tolist() == [6] * 4
    assert values["finish_reason"].tolist() == [b"length"] * 4
    assert values["queue_ms"].shape == (4,) and (values["decode_ms"] >= 0).all()
    assert values["request_id"].shape == (1,)


def test_prompts_are_repeated_row_by_row(make_front: MakeFront, toy: ToyRuntime) -> None:
    request = ask(None, text_input=["abc", "x"], n=2, max_tokens=3, temperature=0.0, exclude_input_in_output=False)
    make_front().execute([request])
    assert texts_of(request) == [prompt + toy.text(ids(prompt), 3) for prompt in ("abc", "abc", "x", "x")]


def test_a_stream_names_the_choice_of_each_piece(make_front: MakeFront) -> None:
    front = make_front()
    flags: dict[str, Any] = {f"return_{name}": True for name in ("finish_reason", "token_ids", "num_output_tokens")}
    request = ask("hello", n=4, seed=7, stream=True, **flags, **RANDOM)
    front.execute([request])
    texts, tokens, ended = [""] * 4, [0] * 4, [b""] * 4
    responses = [values_of(response) for response in request.sender.stream()]
    for values in responses:
        rows = values["choice_index"].tolist()
        assert len(rows) == len(set(rows)) == len(values["text_output"])
        assert len(values["token_ids"]) == values["num_output_tokens"].sum()
        reasons = values.get("finish_reason", np.array([b""] * len(rows), object))
        for row, text, count, reason in zip(
            rows, values["text_output"], values["num_output_tokens"], reasons, strict=True
        ):
            assert not ended[row], "a choice goes on after its end"
            texts[row] += text.decode()
            tokens[row] += int(count)
            ended[row] = reason
    assert texts == singles(front, "hello", [7, 8, 9, 10])
    assert tokens == [12] * 4 and ended == [b"length"] * 4
    assert ["prompt_token_ids" in values for values in responses] == [True] + [False] * (len(responses) - 1)


def test_best_of_gives_the_likeliest_answers(make_front: MakeFront) -> None:
    front = make_front()
    request = ask("hello", n=2, best_of=6, seed=7, **RANDOM)
    scored = ask("hello", n=6, seed=7, logprobs=0, **RANDOM)
    front.execute([request, scored])
    values = values_of(scored.sender.answer())
    means = values["token_logprobs"].reshape(6, 12).mean(axis=1)
    order = np.argsort(-means, kind="stable")[:2]
    assert texts_of(request) == [values["text_output"][place].decode() for place in order]
    assert values_of(request.sender.answer())["choice_index"].tolist() == [0, 1]
    one = ask("hello", best_of=6, seed=7, **RANDOM)
    front.execute([one])
    assert texts_of(one) == texts_of(request)[:1]
    assert set(values_of(one.sender.answer())) == {"text_output"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_ends_all_its_choices(make_front: MakeFront, toy: ToyRuntime, stream: bool) -> None:
    toy.pace = threading.Semaphore(3)
    front = make_front()
    gone, stays = ask(n=8, max_tokens=60, stream=stream), ask(max_tokens=5)
    front.execute([gone])
    wait_for(lambda: front.loop.slots.used == 3)
    front.execute([stays])
    gone.sender.cancelled = True
    wait_for(lambda: len(front.loop.terminations.demanded) == 8)
    toy.pace.release(500)
    error = gone.sender.stream()[-1].error()
    assert error is not None and error.code() == TritonError.CANCELLED
    assert answer_of(stays)["text_output"] == toy.text(ids("abc"), 5)
    assert front.loop.metrics.generated_tokens.value < 60


def test_a_failed_choice_ends_the_others(make_front: MakeFront, toy: ToyRuntime, pb_utils: PbUtils) -> None:
    """The queue has room for some choices of the request, and not for all."""
    toy.open.clear()
    front = make_front(queue_requests=3)
    first = ask(max_tokens=5)
    front.execute([first])
    assert toy.entered.acquire(timeout=30)
    wide = ask(n=5, max_tokens=60)
    front.execute([wide])
    toy.open.set()
    code, text = wide.refusal()
    assert code == TritonError.UNAVAILABLE and text.startswith("queue_requests: 3 requests wait")
    answer_of(first)
    wait_for(lambda: not front.live)
    front.close()
    assert pb_utils.metric("shapeshift_requests_total", code="UNAVAILABLE") == 1
    assert pb_utils.metric("shapeshift_requests_total", code="OK") == 1


def test_stop_id_ends_all_choices_with_their_text(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.pace = threading.Semaphore(4)
    front = make_front()
    request = ask(n=3, max_tokens=50, request_id="one", return_finish_reason=True)
    front.execute([request])
    wait_for(lambda: front.loop.metrics.generated_tokens.value >= 9)
    front.execute([ask(None, stop_id="one")])
    toy.pace.release(100)
    values = values_of(request.sender.answer())
    assert values["finish_reason"].tolist() == [b"abort"] * 3
    assert all(len(text) >= 3 for text in values["text_output"])


def test_token_ids_in_and_out(make_front: MakeFront, toy: ToyRuntime) -> None:
    front = make_front()
    prompts = [ids("hello").tolist(), ids("x").tolist()]
    one = ask(None, input_ids=prompts[0], max_tokens=5, temperature=0.0, return_token_ids=True)
    two = ask(
        None,
        input_ids=prompts[0] + prompts[1],
        input_lengths=[5, 1],
        max_tokens=5,
        temperature=0.0,
        return_token_ids=True,
        exclude_input_in_output=False,
    )
    front.execute([one, two])
    values = values_of(one.sender.answer())
    assert values["text_output"].tolist() == [toy.text(ids("hello"), 5).encode()]
    assert values["token_ids"].tolist() == toy.greedy(prompts[0], 5)
    assert values["prompt_token_ids"].tolist() == prompts[0]
    values = values_of(two.sender.answer())
    assert values["text_output"].tolist() == [(prompt + toy.text(ids(prompt), 5)).encode() for prompt in ("hello", "x")]
    assert values["token_ids"].tolist() == toy.greedy(prompts[0], 5) + toy.greedy(prompts[1], 5)
    assert values["prompt_token_ids"].tolist() == prompts[0] + prompts[1]


def test_the_end_of_sequence_is_among_the_ids_and_not_in_the_text(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.eos_at = 6
    request = ask("hello", return_token_ids=True, return_num_output_tokens=True)
    make_front().execute([request])
    values = values_of(request.sender.answer())
    assert values["token_ids"].tolist() == toy.greedy(ids("hello"), 8) and values["token_ids"][-1] == len(LETTERS)
    assert values["num_output_tokens"].tolist() == [len(values["token_ids"])]


def test_beam_search_has_a_row_for_each_text(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.logits[:, len(LETTERS)] = 5.0
    front = make_front()
    fields: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "early_stopping": "never", "max_tokens": 9}
    flags: dict[str, Any] = {
        f"return_{name}": True for name in ("finish_reason", "num_output_tokens", "token_ids", "timings", "logprobs")
    }
    request = ask(None, text_input=["abc", "x"], exclude_input_in_output=False, **fields, **flags)
    front.execute([request])
    values = values_of(request.sender.answer())
    found = [one for prompt in ("abc", "x") for one in beams_alone(toy, prompt, **fields)]
    ended = [tokens[-1] == len(LETTERS) for tokens, _ in found]
    assert 0 < sum(ended) < len(ended)
    assert values["sequence_score"].tolist() == [score for _, score in found]
    assert values["choice_index"].tolist() == [0, 1, 2, 3]
    assert values["finish_reason"].tolist() == [b"stop" if end else b"length" for end in ended]
    assert values["token_ids"].tolist() == [token for tokens, _ in found for token in tokens]
    assert values["num_output_tokens"].tolist() == [len(tokens) for tokens, _ in found]
    texts = ["".join(TABLE[token].decode() for token in tokens) for tokens, _ in found]
    prompts = ["abc", "abc", "x", "x"]
    assert [text.decode() for text in values["text_output"]] == [a + b for a, b in zip(prompts, texts, strict=True)]
    assert values["logprobs"].tolist() == [b"null"] * 4 and values["queue_ms"].shape == (4,)
    assert values["prompt_token_ids"].tolist() == [*ids("abc"), *ids("x")]


def test_a_beam_search_that_is_stopped_gives_its_beams(make_front: MakeFront, toy: ToyRuntime) -> None:
    toy.pace = threading.Semaphore(3)
    front = make_front()
    request = ask("abc", request_id="me", num_beams=3, max_tokens=60, return_finish_reason=True)
    front.execute([request])
    wait_for(lambda: any(one.generated == 3 for one in front.live))
    front.execute([ask(None, stop_id="me")])
    toy.pace.release(100)
    values = values_of(request.sender.answer())
    assert values["finish_reason"].tolist() == [b"abort"] and len(values["text_output"][0]) >= 3
    assert set(values) == {"text_output", "finish_reason", "sequence_score"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n: got 0; a whole number at least 1 and at most 128"),
    ({"n": 3, "best_of": 2}, "best_of: got 2; at least n (3)"),
    ({"n": 2, "best_of": 3, "stream": True}, "best_of: got 3; n (2) when stream is true"),
    ({"text_input": ["a"] * 65}, "text_input: got '65 prompts'; 1 to 64"),
    ({"text_input": ["a"] * 3, "n": 43}, "n: got 43; at most 128 with all 3 prompts"),
    ({"text_input": ["a"] * 3, "best_of": 43}, "best_of: got 43; at most 128 with all 3 prompts"),
    ({"text_input": ["a", "b" * 64]}, "row 1: text_input: got '64 tokens'; at most 63"),
    ({"text_input": ["a", ""]}, "row 1: text_input: got ''; at least one character"),
    ({"input_ids": [1]}, "input_ids: got [1]; one of text_input and input_ids, not both"),
    ({"text_input": None, "input_ids": []}, "input_lengths: got [0]; numbers of at least 1 with the sum 0"),
    ({"text_input": None, "input_ids": [1, 70]}, "input_ids: got 70; 0 to 69"),
    ({"text_input": None, "input_ids": [1] * 64}, "input_ids: got '64 tokens'; at most 63, one less than max_length"),
    ({"text_input": None, "input_ids": [1, 2], "input_lengths": [1]}, "input_lengths: got [1]; numbers of at least"),
    ({"input_lengths": [1]}, "input_lengths: got [1]; given with input_ids alone"),
    ({"num_beams": 4}, "num_beams: got 4; at most max_concurrency (3)"),
    ({"logprobs": 21}, "logprobs: got 21; a whole number at least 0 and at most 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: got -1; a whole number at least 0 and at most 20"),
    ({"sampling_parameters": '{"use_beam_search": true}'}, "use_beam_search: got True; false, or left out"),
    ({"sampling_parameters": '{"top_logprobs": 2}'}, "sampling_parameters top_logprobs: got 2; 0, or left out"),
]


def test_an_invalid_request_costs_no_other(make_front: MakeFront, toy: ToyRuntime) -> None:
    front = make_front()
    good, refused = ask("first", n=2), [ask("a", **given) for given, _ in REFUSED]
    front.execute([*refused, good])
    for request, (_, message) in zip(refused, REFUSED, strict=True):
        error = request.sender.answer().error()
        assert error is not None, message
        assert error.code() == TritonError.INVALID_ARG and message in error.message()
    assert texts_of(good) == [toy.text(ids("first"), 8)] * 2


def test_what_tritons_openai_frontend_sends_is_taken(make_front: MakeFront, toy: ToyRuntime) -> None:
    """Its converter to vLLM's backend: all fields of the API that are not left out."""
    sampling = (
        '{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": false, "logit_bias": {}, '
        '"best_of": 1, "temperature": 0.0, "top_p": 1.0, "max_tokens": 6, "stop": [], "seed": null}'
    )
    flags: dict[str, Any] = {f"return_{name}": True for name in ("num_input_tokens", "num_output_tokens", "logprobs")}
    request = ask(None, text_input="hello", stream=False, sampling_parameters=sampling, **flags)
    make_front().execute([request])
    values = values_of(request.sender.answer())
    assert values["text_output"].tolist() == [toy.text(ids("hello"), 6).encode()]
    assert values["logprobs"].tolist() == [b"null"] and "choice_index" not in values


def test_a_check_of_the_sidecar_is_counted_apart(make_front: MakeFront, pb_utils: PbUtils) -> None:
    front = make_front()
    for outcome in ("right", "wrong", "wrong"):
        request = ask(max_tokens=3, parameters={"check": outcome})
        front.execute([request])
        answer_of(request)
    wait_for(lambda: not front.live)
    front.close()
    codes = {code: pb_utils.metric("shapeshift_requests_total", code=code) for code in ("CHECK", "CHECK_WRONG", "OK")}
    assert codes == {"CHECK": 1, "CHECK_WRONG": 2, "OK": 0}
    assert pb_utils.metric("shapeshift_request_latency_ms_count") == 0
    assert pb_utils.metric("shapeshift_request_tokens_count") == 0
