"""POST /v1/completions, through OpenAI's own client."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from shapeshift.errors import EngineError, ModelError
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FakeTriton
from tests.waiting import wait_for

ASK = {"model": "generate", "prompt": "one two three"}


def sampling_of(triton: FakeTriton) -> dict[str, Any]:
    return dict(json.loads(triton.calls[-1].inputs["sampling_parameters"][0]))


def stream(url: str, **body: Any) -> list[Any]:
    """The events of a stream; the last one has to be [DONE]."""
    answer = HTTP.post(f"{url}/v1/completions", json={**ASK, "stream": True, **body})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in events]


def test_a_whole_answer(client: openai.OpenAI, triton: FakeTriton) -> None:
    found = client.completions.create(model="generate", prompt="one two three")
    (choice,) = found.choices
    assert (choice.text, choice.index, choice.finish_reason) == ("one two three", 0, "stop")
    assert found.object == "text_completion" and found.model == "generate" and found.id.startswith("cmpl-")
    assert found.usage and (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 3)
    assert client.completions.create(**ASK, max_tokens=2).choices[0].finish_reason == "length"
    assert not triton.calls[0].parameters and triton.calls[0].model == "generate"


def test_a_stream(client: openai.OpenAI) -> None:
    pieces = list(client.completions.create(model="generate", prompt="one two three", stream=True))
    assert [piece.choices[0].text for piece in pieces] == ["one ", "two ", "three"]
    assert [piece.choices[0].finish_reason for piece in pieces] == [None, None, "stop"]
    assert len({piece.id for piece in pieces}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_that_ended_an_answer_is_named(client: openai.OpenAI, stream: bool) -> None:
    asked = client.completions.create(model="generate", prompt="one two three", stop=["x", "three"], stream=stream)
    pieces: list[Any] = list(asked) if stream else [asked]
    choices = [piece.choices[0].model_dump() for piece in pieces]
    assert "".join(one["text"] for one in choices).split() == ["one", "two"]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "three")


def test_usage_at_the_end_of_a_stream(url: str) -> None:
    *pieces, last = stream(url, stream_options={"include_usage": True}, n=2)
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert "usage" not in stream(url)[0]


def test_several_prompts_and_answers(client: openai.OpenAI, url: str) -> None:
    found = client.completions.create(model="generate", prompt=["a b", "c"], n=2)
    assert [(choice.index, choice.text) for choice in found.choices] == [(0, "a b"), (1, "a b"), (2, "c"), (3, "c")]
    assert found.usage and (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 6)
    texts = {0: "", 1: "", 2: "", 3: ""}
    for piece in stream(url, prompt=["a b", "c"], n=2):
        (choice,) = piece["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "a b", 1: "a b", 2: "c", 3: "c"}


def test_prompts_as_tokens(client: openai.OpenAI, triton: FakeTriton) -> None:
    found = client.completions.create(model="generate", prompt=[[4, 5], [6]])
    assert [choice.text for choice in found.choices] == ["4 5", "6"]
    inputs = triton.calls[-1].inputs
    assert (inputs["input_ids"].tolist(), inputs["input_lengths"].tolist()) == ([4, 5, 6], [2, 1])
    assert client.completions.create(model="generate", prompt=[4, 5]).choices[0].text == "4 5"


def test_every_field_reaches_the_generator(client: openai.OpenAI, triton: FakeTriton) -> None:
    same: dict[str, Any] = {
        "n": 2,
        "best_of": 3,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "seed": 7,
        "frequency_penalty": 0.2,
        "logit_bias": {"5": -100.0},
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "bad_words": ["x"],
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "structured_outputs": {"choice": ["a", "b"]},
    }
    own = ("latency_ms", "utility", "slo_class", "request_tag")
    parameters = dict(zip(own, (50.0, 1.0, "batch", "t"), strict=True))
    body = {**same, **parameters, "stop": "end", "user": "me"}
    client.completions.create(model="generate", prompt="a", extra_body=body)
    assert sampling_of(triton) == {**same, "stop": ["end"]}
    assert triton.calls[-1].parameters == parameters


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
            {"json": {"type": "integer"}},
        ),
    ],
)
def test_response_formats(client: openai.OpenAI, triton: FakeTriton, given: Any, wanted: Any) -> None:
    client.completions.create(model="generate", prompt="a", seed=1, extra_body={"response_format": given})
    assert sampling_of(triton).get("structured_outputs") == wanted


def test_logprobs(client: openai.OpenAI, url: str) -> None:
    found = client.completions.create(model="generate", prompt="ab cd", logprobs=1).choices[0].logprobs
    assert found and found.tokens == ["ab", "cd"] and found.token_logprobs == [-0.5, -0.5]
    assert found.text_offset == [0, 2] and found.top_logprobs == [{"x": -0.25, "ab": -0.5}, {"x": -0.25, "cd": -0.5}]
    pieces = stream(url, logprobs=0)
    assert [piece["choices"][0]["logprobs"]["text_offset"] for piece in pieces] == [[0], [3], [6]]


def test_a_stream_repeats_the_prompt_with_its_logprobs_for_each_answer(url: str) -> None:
    whole = HTTP.post(f"{url}/v1/completions", json={**ASK, "echo": True, "logprobs": 1, "n": 2}).json()["choices"]
    pieces = [piece["choices"][0] for piece in stream(url, echo=True, logprobs=1, n=2)]
    for choice in whole:
        parts = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
    assert whole[0]["logprobs"]["token_logprobs"][0] is None and len(whole[0]["logprobs"]["tokens"]) == 6


def test_logprobs_of_the_prompt_as_in_vllm(url: str) -> None:
    body = {**ASK, "prompt_logprobs": 1, "n": 2}
    for choice in HTTP.post(f"{url}/v1/completions", json=body).json()["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None and choice["logprobs"] is None and len(others) == 2
        assert others[0]["7"]["decoded_token"] == "two" and others[0]["8"]["rank"] == 1


def test_each_piece_says_the_usage_so_far_on_request(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = stream(url, stream_options=options)
    assert [piece["usage"]["completion_tokens"] for piece in pieces] == [1, 2, 3, 3]


def test_echo(client: openai.OpenAI, triton: FakeTriton, url: str) -> None:
    client.completions.create(model="generate", prompt="ab", echo=True)
    assert triton.calls[-1].inputs["exclude_input_in_output"].tolist() == [False]
    assert "".join(piece["choices"][0]["text"] for piece in stream(url, echo=True)) == "one two threeone two three"
    (first, second) = stream(url, echo=True, max_tokens=0, n=2)
    assert [one["choices"][0]["text"] for one in (first, second)] == ["one two three"] * 2
    scored = client.completions.create(model="generate", prompt="ab cd", echo=True, logprobs=0, max_tokens=0)
    (choice,) = scored.choices
    assert choice.text == "ab cd" and choice.logprobs and choice.logprobs.token_logprobs == [None, -0.5]
    assert choice.logprobs.tokens == ["ab ", "cd"] and choice.logprobs.text_offset == [0, 3]
    assert scored.usage and scored.usage.completion_tokens == 0
    (choice,) = client.completions.create(model="generate", prompt=[7, 8], echo=True, max_tokens=0).choices
    assert choice.text == "7 8" and choice.logprobs is None
    more = client.completions.create(model="generate", prompt=[7, 8], echo=True, max_tokens=1, logprobs=0).choices[0]
    assert more.text == "7 87" and more.logprobs and more.logprobs.text_offset == [0, 2, 3]


def test_an_error_before_the_first_piece_has_its_status(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.failure = ModelError("temperature: got -1.0; 0 to 1e+30", "INVALID_ARG")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="generate", prompt="a", temperature=-1, stream=True)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    ("failure", "said", "param"),
    [
        (EngineError("it broke"), "it broke", None),
        (ModelError("text_input: got 'b'; a text", "INVALID_ARG"), "prompt: got 'b'; a text", "prompt"),
    ],
)
def test_an_error_in_a_stream_is_an_event(
    client: openai.OpenAI, triton: FakeTriton, failure: Exception, said: str, param: str | None
) -> None:
    triton.late_failure = failure
    pieces = client.completions.create(model="generate", prompt="a b", stream=True)
    assert next(pieces).choices[0].text == "a "
    with pytest.raises(openai.APIError, match=said) as caught:
        next(pieces)
    assert caught.value.param == param


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_away_cancels_its_request(url: str, triton: FakeTriton, streamed: bool) -> None:
    triton.pause_s = 0.3 if streamed else 30.0
    body = json.dumps({**ASK, "prompt": "x " * 60, "max_tokens": 60, "stream": streamed}).encode()
    host, port = urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: triton.calls)
        if streamed:
            assert connection.recv(100)
    wait_for(lambda: id(triton.calls[-1]) in triton.cancelled, timeout_s=10)


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"n": "2"}, "n", "invalid_value"),
        ({"n": 1e30}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": [[1], "a"]}, "prompt[1]", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [True]}, "prompt", "invalid_value"),
        ({"stop": 3}, "stop", "invalid_value"),
        ({"logit_bias": {"a": "b"}}, "logit_bias.a", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_parameter"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"echo": True, "stream": True, "prompt": [1]}, "prompt", "unsupported_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
    ],
)
def test_bad_input_is_named(url: str, more: dict[str, Any], param: str, code: str) -> None:
    answer = HTTP.post(f"{url}/v1/completions", json={**ASK, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


def test_a_name_leads_to_the_front_that_streams(client: openai.OpenAI, triton: FakeTriton) -> None:
    for name in ("generate", "generate_unary"):
        client.completions.create(model=name, prompt="a b")
    assert [call.model for call in triton.calls] == ["generate", "generate"]


@pytest.mark.parametrize("name", ["generate_lora:shout", "shout"])
def test_an_adapter_is_a_request_parameter(client: openai.OpenAI, triton: FakeTriton, name: str) -> None:
    answer = client.completions.create(model=name, prompt="a b")
    (call,) = triton.calls
    assert (call.model, call.parameters["lora_name"], answer.model) == ("generate_lora", "shout", name)
