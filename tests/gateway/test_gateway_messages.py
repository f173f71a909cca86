"""Anthropic's API through its client, of models whose answers a test states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase

from shapeshift.errors import ModelError
from shapeshift.gateway.apis.generation.messages_request import Block, CountRequest, MessagesRequest, ToolParam
from shapeshift.gateway.http import api_keys
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import TEMPLATE, FakeTriton, with_templates
from tests.gateway.test_gateway_turns import ANSWER, CALLS, NAMES, TEMPLATES, prompt_of, sampling_of, tokens

TOOLS: Any = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in NAMES]
SWITCH = TEMPLATE + "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
ASK: list[Any] = [{"role": "user", "content": "hello you"}]
CALLED = {"type": "tool_use", "id": "a", "name": "news", "input": {}}
TEXT = "<system>Be short.\n<user>hello you\n<assistant>"


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton(with_templates({**TEMPLATES, "switch": SWITCH}))


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def ask(client: anthropic.Anthropic, model: str, **more: Any) -> Any:
    fields: dict[str, Any] = {"max_tokens": 500, "messages": ASK, **more}
    return client.messages.create(model=model, **fields)


def streamed(client: anthropic.Anthropic, model: str, **more: Any) -> tuple[Any, list[Any]]:
    """The message that the client puts together, and the events."""
    fields: dict[str, Any] = {"max_tokens": 500, "messages": ASK, **more}
    with client.messages.stream(model=model, **fields) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def without_ids(message: Any) -> Any:
    """What two answers have in common."""
    shown = message.model_dump(exclude={"id": True, "content": {"__all__": {"id", "signature"}}})
    return {**shown, "content": [{k: v for k, v in one.items() if v is not None} for one in shown["content"]]}


def test_a_text(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    triton.answers = [["Hello ", "there"]] * 2
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "latency_ms": 2000}
    more: dict[str, Any] = {"stop_sequences": ["x"], "system": system, "extra_body": options}
    message = ask(client, "plain", **more)
    assert prompt_of(triton) == TEXT
    assert sampling_of(triton) == {
        "add_special_tokens": False,
        "max_tokens": 500,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "stop": ["x"],
    }
    assert triton.calls[-1].parameters["latency_ms"] == 2000
    assert (message.content[0].text, message.role, message.stop_reason) == ("Hello there", "assistant", "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(TEXT.split()), 2)
    together, events = streamed(client, "plain", **more)
    assert without_ids(together) == without_ids(message)
    assert [event.delta.text for event in events if event.type == "content_block_delta"] == ["Hello ", "there"]


def test_all_events_in_their_order(url: str, triton: FakeTriton) -> None:
    triton.answers = [tokens("<think>why</think>" + ANSWER)]
    body = {"model": "thinks", "max_tokens": 500, "messages": ASK, "stream": True, "tools": TOOLS}
    answer = HTTP.post(f"{url}/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [dict(line.split(": ", 1) for line in one.splitlines()) for one in answer.text.strip().split("\n\n")]
    contents = [json.loads(one["data"]) for one in events]
    assert [one["event"] for one in events] == [one["type"] for one in contents]
    shown: list[Any] = []
    for one in contents:
        kind = one.get("delta", {}).get("type") or one.get("content_block", {}).get("type")
        step = (one["type"].removeprefix("content_block_"), one.get("index"), kind)
        if shown[-1:] != [step]:
            shown.append(step)
    blocks = [("thinking", ["thinking_delta", "signature_delta"]), ("text", ["text_delta"])]
    blocks += [("tool_use", ["input_json_delta"])] * 2
    expected: list[Any] = [("message_start", None, None), ("ping", None, None)]
    for index, (block, deltas) in enumerate(blocks):
        expected += [("start", index, block), *(("delta", index, one) for one in deltas), ("stop", index, None)]
    assert shown == [*expected, ("message_delta", None, None), ("message_stop", None, None)]
    ended = {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None, "container": None}
    assert contents[-2]["delta"] == ended
    assert contents[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize("model", ["hermes", "thinks"])
def test_tools_and_thinking_are_the_same_in_a_stream(
    client: anthropic.Anthropic, triton: FakeTriton, model: str
) -> None:
    triton.answers = [tokens(("why</think>" if model == "thinks" else "") + ANSWER)] * 2
    message = ask(client, model, tools=TOOLS)
    calls = [(one.name, one.input) for one in message.content if one.type == "tool_use"]
    assert (calls, message.stop_reason) == (CALLS, "tool_use")
    assert [one.text for one in message.content if one.type == "text"] == ["Look:"]
    assert [one.thinking for one in message.content if one.type == "thinking"] == ["why"] * (model == "thinks")
    together, _ = streamed(client, model, tools=TOOLS)
    assert without_ids(together) == without_ids(message)


def test_an_answer_is_sent_back_with_results(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    triton.answers = [tokens("why</think>" + ANSWER), ["It ", "rains."]]
    message = ask(client, "thinks", tools=TOOLS)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": one.id, "content": "rain", "is_error": False}
        for one in message.content
        if one.type == "tool_use"
    ]
    results[1]["content"] = [{"type": "text", "text": "sun"}]
    said = {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]}
    messages = [*ASK, {"role": "assistant", "content": message.content}, said]
    answer = ask(client, "hermes", messages=messages, tools=TOOLS)
    assert prompt_of(triton).startswith(
        "<user>hello you\n<assistant>Look:\n<tool>rain\n<tool>sun\n<user>So?\n<assistant>"
    )
    assert [one.text for one in answer.content] == ["It rains."]


def test_the_clients_own_loop_of_tools(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    triton.answers = [tokens(ANSWER.partition('\n<tool_call>\n{"name": "news')[0]), ["It ", "rains."]]
    loop = client.beta.messages.tool_runner(model="hermes", max_tokens=50, messages=ASK, tools=[weather])
    assert [one.text for one in loop.until_done().content if one.type == "text"] == ["It rains."]
    assert "<tool>rain in Paris" in prompt_of(triton)


def test_choices_among_tools(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    def forced(text: str, **choice: Any) -> Any:
        triton.answers = [tokens(text)]
        return ask(client, "plain", tools=TOOLS, tool_choice=choice)

    for message in (
        forced('{"name": "news", "arguments": {"a": 1}}', type="any"),
        forced('{"a": 1}', type="tool", name="news"),
    ):
        (call,) = message.content
        assert (call.name, call.input, message.stop_reason) == ("news", {"a": 1}, "tool_use")
    assert sampling_of(triton)["structured_outputs"] == {
        "json": {**TOOLS[1]["input_schema"], "additionalProperties": False}
    }
    triton.answers = [tokens(ANSWER)] * 2
    message = ask(client, "hermes", tools=TOOLS, tool_choice={"type": "none"})
    assert (message.content[0].text, message.stop_reason) == (ANSWER, "end_turn")
    alone = ask(client, "hermes", tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [one.type for one in alone.content] == ["text", "tool_use"]


def test_an_answer_that_is_cut(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    triton.answers = [["Hello ", "there"], ['{"ci', 'ty"']]
    assert ask(client, "plain", max_tokens=1).stop_reason == "max_tokens"
    choice = {"type": "tool", "name": "news"}
    message = ask(client, "plain", max_tokens=1, tools=TOOLS, tool_choice=choice)
    assert (message.content[0].input, message.stop_reason) == ({}, "max_tokens")


def test_thinking(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    triton.answers = [["a ", "b ", "c ", "d</think>", "e"], ["Yes."]]
    message = ask(client, "thinks", thinking={"type": "enabled", "budget_tokens": 2})
    assert [(one.type, getattr(one, one.type)) for one in message.content] == [("thinking", "a b"), ("text", "Yes.")]
    for thinking, end in (({"type": "enabled", "budget_tokens": 20}, "<think>"), ({"type": "adaptive"}, "<assistant>")):
        ask(client, "switch", thinking=thinking)
        assert prompt_of(triton).endswith(end)
    ask(client, "thinks", thinking={"type": "disabled"})
    assert prompt_of(triton).endswith("<assistant><think></think>")
    ask(client, "efforts", output_config={"effort": "high"})
    assert prompt_of(triton).endswith("high")


def test_the_sequence_that_ended_an_answer_is_named(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    triton.answers = [["It is ", "6. ", "END", " no more"]] * 2
    for message in (
        ask(client, "plain", stop_sequences=["x", "END"]),
        streamed(client, "plain", stop_sequences=["x", "END"])[0],
    ):
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
            "It is 6. ",
            "stop_sequence",
            "END",
        )
    message = ask(client, "plain", stop_sequences=["x"])
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_a_schema(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    ask(client, "plain", output_config={"format": form})
    assert sampling_of(triton)["structured_outputs"] == {"json": {"type": "object"}}


def test_tokens_are_counted(client: anthropic.Anthropic, triton: FakeTriton) -> None:
    counted = client.messages.count_tokens(model="plain", messages=ASK, system="Be short.")
    assert counted.input_tokens == len(TEXT.split())
    assert prompt_of(triton) == TEXT and triton.calls[-1].outputs == ("TOKENS",), "no token is generated"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"nonsense": 1}, "nonsense"),
        ({"container": "a"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": []}, "messages"),
        ({"messages": [*ASK, {"role": "assistant", "content": ""}]}, "messages"),
        ({"messages": [*ASK, {"role": "assistant", "content": [CALLED]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "tools": TOOLS,
                "tool_choice": {"type": "any"},
            },
            "output_config.format",
        ),
    ],
)
def test_what_cannot_be_done_is_named(client: anthropic.Anthropic, fields: dict[str, Any], param: str) -> None:
    fields = {"model": "plain", "max_tokens": 100, "messages": ASK, **fields}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.post("/v1/messages", body=fields, cast_to=object)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["details"]["param"] == param and param in body["error"]["message"]
    assert refused.value.error_code


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        (MessagesRequest, MessageCreateParamsBase),
        (CountRequest, MessageCountTokensParams),
        (ToolParam, anthropic.types.ToolParam),
        (Block, anthropic.types.TextBlockParam),
        (Block, anthropic.types.ThinkingBlockParam),
        (Block, anthropic.types.ToolUseBlockParam),
        (Block, anthropic.types.ToolResultBlockParam),
    ],
)
def test_fields_of_the_client_are_served_or_refused_by_name(model: Any, sent: Any) -> None:
    assert sent.__annotations__.keys() <= model.model_fields.keys()


def test_errors_have_the_shape_of_the_api(url: str, client: anthropic.Anthropic, triton: FakeTriton) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask(client, "nobody")
    with pytest.raises(anthropic.NotFoundError):
        client.post("/v1/messages/batches", body={}, cast_to=object)
    triton.failure = ModelError("structured_outputs: got a schema that recurses; another one", "INVALID_ARG")
    with pytest.raises(anthropic.BadRequestError, match=r"tools: got a schema"):
        ask(client, "plain", tools=TOOLS, tool_choice={"type": "any"})
    triton.failure = ModelError("full", "UNAVAILABLE")
    with pytest.raises(anthropic.RateLimitError):
        ask(client, "plain", stream=True)
    triton.failure, triton.late_failure = None, ModelError("it broke", "INTERNAL")
    with pytest.raises(anthropic.APIStatusError, match="it broke") as broken:
        streamed(client, "plain")
    assert broken.value.body["error"]["type"] == "api_error"
    assert HTTP.post(f"{url}/v1/messages", content=b"{").json()["error"]["details"]["error_code"] == "invalid_json"


def test_a_key_in_either_header(start_gateway: Callable[..., str], triton: FakeTriton, tmp_path: Any) -> None:
    key = api_keys.add(tmp_path / "keys", "ana")
    url = start_gateway(triton, api_keys=tmp_path / "keys")
    for api_key, auth_token in ((key, None), (None, key)):
        with anthropic.Anthropic(
            base_url=url, max_retries=2, timeout=20, api_key=api_key, auth_token=auth_token
        ) as client:
            assert ask(client, "plain").role == "assistant"
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        ask(client, "plain")
    assert refused.value.body["error"]["type"] == "authentication_error"
