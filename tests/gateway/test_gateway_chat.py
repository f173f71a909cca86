"""POST /v1/chat/completions, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FRONTS, FakeTriton
from tests.waiting import wait_for

ASK: dict[str, Any] = {"model": "generate", "messages": [{"role": "user", "content": "hello you"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "g"}}


def sampling_of(triton: FakeTriton) -> dict[str, Any]:
    return dict(json.loads(triton.calls[-1].inputs["sampling_parameters"][0]))


def prompt_of(triton: FakeTriton) -> str:
    return str(triton.calls[-1].inputs["text_input"][0].decode())


def test_a_conversation(client: openai.OpenAI, triton: FakeTriton) -> None:
    messages: Any = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    found = client.chat.completions.create(model="generate", messages=messages)
    assert prompt_of(triton) == "<system>be short\n<user>one\ntwo\n<assistant>"
    (choice,) = found.choices
    assert choice.message.role == "assistant" and choice.message.content == "<system>be short <user>one two <assistant>"
    assert (choice.finish_reason, choice.index, found.object) == ("stop", 0, "chat.completion")
    assert found.usage and found.usage.prompt_tokens == 5 and found.id.startswith("chatcmpl-")
    # Without a limit the answer may fill what the model has.
    assert sampling_of(triton) == {"max_tokens": 64, "add_special_tokens": False}, "which the template writes"


def test_an_answer_can_be_sent_back(client: openai.OpenAI, triton: FakeTriton) -> None:
    asked: Any = dict(ASK)
    cases: Any = ({}, {"tools": [TOOL], "tool_choice": "required"})
    for more in cases:
        answer = client.chat.completions.create(**asked, **more).choices[0].message
        parts = [{"type": "text", "text": "b"}, {"type": "refusal", "refusal": "no"}]
        own: list[Any] = [
            {**answer.model_dump(), "annotations": []},
            {"role": "assistant", "content": parts},
            {"role": "assistant", "content": None, "refusal": "never"},
        ]
        client.chat.completions.create(model="generate", messages=[*ASK["messages"], *own])
        assert prompt_of(triton).endswith("<assistant>b\nno\n<assistant>never\n<assistant>")


def test_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(**ASK, n=2, stream=True, stream_options={"include_usage": True})
    *pieces, last = list(stream)
    assert last.choices == [] and last.usage and last.usage.completion_tokens == 6
    texts = {0: "", 1: ""}
    roles: dict[int, list[Any]] = {0: [], 1: []}
    for piece in pieces:
        (choice,) = piece.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index].append(choice.delta.role)
    assert (
        texts == {0: "<user>hello you <assistant>", 1: "<user>hello you <assistant>"} or len(set(texts.values())) == 1
    )
    assert all(own[0] == "assistant" and set(own[1:]) == {None} for own in roles.values())
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_the_asynchronous_client(url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=20) as client:
            whole = await client.chat.completions.create(**ASK)
            stream = await client.chat.completions.create(**ASK, stream=True)
            pieces = [piece.choices[0].delta.content or "" async for piece in stream]
            return [whole.choices[0].message.content or "", "".join(pieces)]

    assert len(set(asyncio.run(ask()))) == 1


def test_limits_of_the_answer(client: openai.OpenAI, triton: FakeTriton) -> None:
    assert client.chat.completions.create(**ASK, max_completion_tokens=1).choices[0].finish_reason == "length"
    assert sampling_of(triton)["max_tokens"] == 1
    client.chat.completions.create(**ASK, max_tokens=2)
    assert sampling_of(triton)["max_tokens"] == 2


def test_logprobs(client: openai.OpenAI, triton: FakeTriton) -> None:
    found = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=1, max_tokens=1).choices[0].logprobs
    assert sampling_of(triton)["logprobs"] == 1
    assert found and found.content
    (token,) = found.content
    assert (token.token, token.logprob, token.bytes) == ("<user>hello", -0.5, list(b"<user>hello"))
    assert [(one.token, one.logprob) for one in token.top_logprobs] == [("x", -0.25)]


def test_a_forced_function(client: openai.OpenAI, triton: FakeTriton) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        found = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=choice)
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
        assert sampling_of(triton)["structured_outputs"] == {"json": schema}
        assert found.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
        (call,) = found.choices[0].message.tool_calls
        assert (call.function.name, call.type) == ("f", "function") and found.choices[0].message.content is None
        assert call.function.arguments == "<user>hello you <assistant>"
    asked: Any = {**ASK, "tools": [TOOL], "tool_choice": "required"}
    assert client.chat.completions.create(**asked, max_tokens=1).choices[0].finish_reason == "length"
    stream = list(client.chat.completions.create(**asked, stream=True))
    assert [piece.choices[0].finish_reason for piece in stream][-1] == "tool_calls"
    calls = [call for piece in stream for call in piece.choices[0].delta.tool_calls]
    assert calls[0].function.name == "f" and calls[0].id and calls[1].id is None
    assert "".join(call.function.arguments for call in calls) == "<user>hello you <assistant>"


def test_tools_are_given_to_the_template(start_gateway: Callable[..., str]) -> None:
    front = {**FRONTS["generate"], "tool_use_template": "{{ tools[0].function.name }}<tool_call>", "stream": "tools"}
    triton = FakeTriton({"tools": front})
    url = start_gateway(triton)
    ask = {**ASK, "model": "tools", "tools": [TOOL]}
    # A new name has the servers asked again, at most once a second.
    wait_for(lambda: HTTP.post(f"{url}/v1/chat/completions", json=ask).status_code == 200, pause_s=0.3)
    assert prompt_of(triton) == "f<tool_call>"
    HTTP.post(f"{url}/v1/chat/completions", json={**ask, "tool_choice": "none"})
    assert prompt_of(triton) == "<user>hello you\n<assistant>"


def test_a_model_without_a_template_says_what_to_do(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat_template.jinja") as caught:
        client.chat.completions.create(**{**ASK, "model": "generate_lora"})
    assert (caught.value.param, caught.value.code) == ("model", "model_not_supported")


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "a", "mood": "x"}]}, "messages[0].mood", "unknown_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"tools": [TOOL, OTHER, TOOL]}, "tools", "invalid_value"),
        ({"tools": [TOOL]}, "tools", "model_not_supported"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"messages": [*ASK["messages"], {"role": "tool", "tool_call_id": "a", "content": "b"}]},
            "messages[1].tool_call_id",
            "invalid_value",
        ),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "invalid_value"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        ({"thinking_token_budget": 0}, "thinking_token_budget", "invalid_value"),
        ({"thinking_token_budget": 10**10}, "thinking_token_budget", "invalid_value"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "invalid_value"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"colour": 1}, "colour", "unknown_parameter"),
    ],
)
def test_bad_input_is_named(url: str, more: dict[str, Any], param: str, code: str) -> None:
    answer = HTTP.post(f"{url}/v1/chat/completions", json={**ASK, **more})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(param), error
    assert error["code"] == code, error


def test_fields_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    same = {"store": False, "modalities": ["text"], "metadata": {"a": "b"}, "user": "me", "service_tier": "auto"}
    assert client.chat.completions.create(**ASK, extra_body={**same, "parallel_tool_calls": False}).choices


def test_a_template_that_loops_is_refused_and_holds_nobody_up(start_gateway: Callable[..., str]) -> None:
    loop = "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}"
    url = start_gateway(FakeTriton({"generate": {**FRONTS["generate"], "chat_template": loop}}))
    wait_for(lambda: HTTP.get(f"{url}/v1/models").json()["data"], pause_s=0.05)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(HTTP.post, f"{url}/v1/chat/completions", json=ASK)
        assert HTTP.get(f"{url}/v1/models").status_code == 200
    error = asked.result().json()["error"]
    assert (asked.result().status_code, error["param"]) == (400, "messages") and "chat template" in error["message"]
