"""Tools that the model chooses and reasoning, through OpenAI's client, of models whose answers a test states."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import httpx2
import openai
import pytest

from shapeshift.gateway.apis.generation.chat import Message
from tests.gateway.fake_triton import TEMPLATE, FakeTriton, with_templates
from tests.waiting import wait_for

THINKS = "{% if enable_thinking is not defined or enable_thinking %}<think>{% else %}<think></think>{% endif %}"
HERMES = TEMPLATE + "{% if tools %}{{ tools[0].function.name }}{% endif %}{# <tool_call> #}"
TEMPLATES = {
    "hermes": HERMES,
    "thinks": HERMES + THINKS,
    "efforts": TEMPLATE + "{{ reasoning_effort }}{# <think></think> #}",
    "plain": TEMPLATE,
}
NAMES = ("weather", "news")
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in NAMES
]
CALLS = [("weather", {"city": "Paris"}), ("news", {"city": "Rom", "more": [1, 2]})]
ANSWER = "Look:" + "".join(
    f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)
ASK: list[Any] = [{"role": "user", "content": "hello you"}]


def tokens(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    fronts = with_templates(TEMPLATES)
    fronts["stated"] = {**fronts["plain"], "stream": "stated", "tool_parser": "mistral"}
    return FakeTriton(fronts)


def sampling_of(triton: FakeTriton) -> dict[str, Any]:
    return dict(json.loads(triton.calls[-1].inputs["sampling_parameters"][0]))


def prompt_of(triton: FakeTriton) -> str:
    return str(triton.calls[-1].inputs["text_input"][0].decode())


def ask(client: openai.OpenAI, model: str, **more: Any) -> Any:
    return client.chat.completions.create(model=model, messages=ASK, **more)


def streamed(client: openai.OpenAI, model: str, **more: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message of a stream, put together as clients do, and its pieces."""
    pieces = list(ask(client, model, stream=True, **more))
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for piece in (piece for piece in pieces if piece.choices):
        (choice,) = piece.choices
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(message["calls"])
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments
        message["finish_reason"] = choice.finish_reason
    message["calls"] = [(name, json.loads(arguments)) for name, arguments in message["calls"]]
    return message, pieces


def test_a_model_calls_tools_by_itself(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [tokens(ANSWER)] * 2
    choice = ask(client, "hermes", tools=TOOLS).choices[0]
    assert prompt_of(triton).endswith("<assistant>weather") and sampling_of(triton)["skip_special_tokens"] is False
    calls = choice.message.tool_calls
    assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == CALLS
    assert (choice.message.content, choice.finish_reason) == ("Look:", "tool_calls")
    assert len({one.id for one in calls}) == 2
    message, pieces = streamed(client, "hermes", tools=TOOLS)
    assert message == {"content": "Look:", "reasoning_content": "", "calls": CALLS, "finish_reason": "tool_calls"}
    roles = [piece.choices[0].delta.role for piece in pieces]
    assert roles[0] == "assistant" and set(roles[1:]) == {None}
    assert sum(bool(piece.choices[0].delta.tool_calls) for piece in pieces) > 10, "arguments come piece by piece"


def test_of_200_streams_with_tools_at_once_none_is_lost_and_nothing_is_left(url: str, triton: FakeTriton) -> None:
    body = {"model": "hermes", "messages": ASK, "tools": TOOLS, "stream": True}
    pieces = [ANSWER[at : at + 12] for at in range(0, len(ANSWER), 12)]

    async def one(client: httpx2.AsyncClient) -> list[Any]:
        arguments = ["", ""]
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        for line in lines[:-1]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            for call in choice["delta"].get("tool_calls", ()):
                arguments[call["index"]] += call["function"]["arguments"]
        return [*map(json.loads, arguments), choice["finish_reason"], lines[-1]]

    async def at_once() -> list[list[Any]]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client) for _ in range(200)))

    def objects() -> int:
        """Those of this process, which the gateway shares."""
        triton.calls.clear()
        gc.collect()
        return len(gc.get_objects())

    # Each stream waits behind every piece, until all have begun.
    triton.pause_s, before = 0.1, 0
    for _ in range(2):
        before, triton.answers = objects(), [pieces] * 200
        answers = asyncio.run(at_once())
        assert answers == [[*(arguments for _, arguments in CALLS), "tool_calls", "data: [DONE]"]] * 200
    wait_for(lambda: objects() < before + 200, timeout_s=30, pause_s=0.5)


def test_calls_and_their_results_are_sent_back(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [tokens(ANSWER)] * 4
    said: list[Any] = [ask(client, "hermes", tools=TOOLS).choices[0].message]
    # What OpenAI's client makes of an answer has more fields.
    strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    said.append(client.chat.completions.parse(model="hermes", messages=ASK, tools=strict).choices[0].message)
    with client.chat.completions.stream(model="hermes", messages=ASK, tools=strict) as stream:
        said.append(stream.get_final_completion().choices[0].message)
    calls: dict[int, Any] = {}
    for piece in ask(client, "hermes", tools=TOOLS, stream=True):
        for call in piece.choices[0].delta.tool_calls or ():
            calls.setdefault(call.index, call).function.arguments += call.function.arguments if call.id is None else ""
    said.append({"role": "assistant", "content": "Look:", "tool_calls": [one.model_dump() for one in calls.values()]})
    assert said[1].tool_calls[0].function.parsed_arguments and said[3]["tool_calls"][1]["index"] == 1
    for message in said:
        triton.answers = [["It ", "rains."]]
        shown = message if isinstance(message, dict) else message.to_dict()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in shown["tool_calls"]]
        read = str(Message.model_validate(shown).for_template())
        assert "arguments" in read and "parsed" not in read and "index" not in read
        messages: Any = [*ASK, message, *results]
        answer = client.chat.completions.create(model="hermes", messages=messages, tools=TOOLS).choices[0]
        assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("It rains.", None, "stop")


def test_tools_that_are_not_to_be_called(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [tokens(ANSWER)]
    choice = ask(client, "hermes", tools=TOOLS, tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (ANSWER, None, "stop")
    assert prompt_of(triton).endswith("<assistant>")
    triton.answers = [tokens(ANSWER)]
    assert len(ask(client, "hermes", tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_one_of_several_tools_has_to_be_called(client: openai.OpenAI, triton: FakeTriton) -> None:
    for stream in (False, True):
        triton.answers = [tokens(json.dumps({"name": "news", "arguments": {"city": "Rom"}}))]
        if stream:
            message, _ = streamed(client, "plain", tools=TOOLS, tool_choice="required")
            assert (message["calls"], message["finish_reason"]) == ([("news", {"city": "Rom"})], "tool_calls")
        else:
            choice = ask(client, "plain", tools=TOOLS, tool_choice="required").choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "news"
        triton.answers = [['{"name": "news", "arguments": {"ci']]
        cut = ask(client, "plain", tools=TOOLS, tool_choice="required", max_tokens=1).choices[0]
        assert (cut.message.tool_calls[0].function.arguments, cut.finish_reason) == ('{"ci', "length")
        options = sampling_of(triton)["structured_outputs"]["json"]["anyOf"]
        assert [one["properties"]["name"] for one in options] == [{"const": name} for name in NAMES]


def test_a_call_by_a_grammar_has_no_argument_that_its_schema_does_not_name(
    client: openai.OpenAI, triton: FakeTriton
) -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}}
    either = {"anyOf": [point, {"type": "null"}]}
    open_ones = {
        "merged": {"allOf": [point, {"properties": {"y": {}}}]},
        "beside": {"properties": {"x": {}}, "anyOf": [{"properties": {"y": {}}}, {}]},
        "stated": {"properties": {"properties": {"const": "x"}}, "additionalProperties": {"type": "string"}},
    }
    schema = {
        "type": "object",
        "properties": {"at": {"items": point}, "either": either, **open_ones},
        "$defs": {"p": point},
    }
    tool: Any = {"type": "function", "function": {"name": "draw", "parameters": schema}}
    triton.answers = [["{}"]]
    ask(client, "plain", tools=[tool], tool_choice="required")
    shut = {**point, "additionalProperties": False}
    properties = {"at": {"items": shut}, "either": {"anyOf": [shut, {"type": "null"}]}, **open_ones}
    expected = {"type": "object", "additionalProperties": False, "properties": properties, "$defs": {"p": shut}}
    assert sampling_of(triton)["structured_outputs"]["json"] == expected


def test_a_thousand_tools_and_a_stated_form(client: openai.OpenAI, triton: FakeTriton) -> None:
    many = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1000)]
    triton.answers = [['[TOOL_CALLS][{"name": "f999", ', '"arguments": {}, "id": "abcdefghi"}]']]
    (call,) = ask(client, "stated", tools=many).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments, call.id) == ("f999", "{}", "abcdefghi")


def test_what_no_tool_is_stays_text_in_both_ways(client: openai.OpenAI, triton: FakeTriton) -> None:
    text = 'I write <tool_call>{"name": "nobody"}</tool_call> so.'
    triton.answers = [tokens(text)] * 2
    assert ask(client, "hermes", tools=TOOLS).choices[0].message.content == text
    assert streamed(client, "hermes", tools=TOOLS)[0]["content"] == text


def test_reasoning_is_apart_and_counted(client: openai.OpenAI, triton: FakeTriton) -> None:
    said = ["hm", ", ", "so", "\n", "</think>", "\n\n", "Yes", "."]
    triton.answers = [said, said]
    answer = ask(client, "thinks")
    assert triton.calls[-1].inputs["stream"][0], "each response says how many tokens it has"
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "hm, so")
    assert answer.usage.completion_tokens == 8 and answer.usage.completion_tokens_details.reasoning_tokens == 5
    whole, pieces = streamed(client, "thinks", stream_options={"include_usage": True})
    assert (whole["content"], whole["reasoning_content"]) == ("Yes.", "hm, so")
    assert pieces[-1].usage.completion_tokens_details.reasoning_tokens == 5
    triton.answers = [["Yes", "."]]
    answer = ask(client, "thinks", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert prompt_of(triton).endswith("<think></think>") and answer.choices[0].message.content == "Yes."
    triton.answers = [["Yes", "."]]
    ask(client, "thinks", reasoning_effort="none")
    assert prompt_of(triton).endswith("<think></think>")


def test_the_effort_is_given_to_a_template_that_reads_it(client: openai.OpenAI, triton: FakeTriton) -> None:
    ask(client, "efforts", reasoning_effort="low")
    assert prompt_of(triton).endswith("<assistant>low")


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_ends_the_reasoning(client: openai.OpenAI, triton: FakeTriton, stream: bool) -> None:
    budget = {"extra_body": {"thinking_token_budget": 3}, "max_tokens": 9}
    triton.answers = [["so", " ", "many", " ", "words"], ["Yes", "."]]
    if stream:
        message, pieces = streamed(client, "thinks", stream_options={"include_usage": True}, **budget)
        text, thought, usage = message["content"], message["reasoning_content"], pieces[-1].usage
    else:
        answer = ask(client, "thinks", **budget)
        message, usage = answer.choices[0].message, answer.usage
        text, thought = message.content, message.reasoning_content
    assert (text, thought) == ("Yes.", "so many")
    first, second = triton.calls
    assert second.inputs["text_input"][0] == first.inputs["text_input"][0] + b"so many\n</think>\n\n"
    assert id(first) in triton.cancelled and sampling_of(triton)["max_tokens"] == 6
    assert usage.completion_tokens == 5 and usage.completion_tokens_details.reasoning_tokens == 3
    assert usage.prompt_tokens == len(first.inputs["text_input"][0].split())


def test_budgets_of_none_and_of_more_than_there_is(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [["hm", " so", "</think>", "Yes."]]
    answer = ask(client, "thinks", extra_body={"thinking_token_budget": 10**9}).choices[0].message
    assert (answer.content, answer.reasoning_content) == ("Yes.", "hm so") and len(triton.calls) == 1
    triton.answers = [["hm", " so"], ["Yes."]]
    answer = ask(client, "thinks", extra_body={"thinking_token_budget": 0}).choices[0].message
    assert answer.content == "Yes." and prompt_of(triton).endswith("</think>\n\n")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "thinks", n=2, extra_body={"thinking_token_budget": 1})
    assert caught.value.param == "thinking_token_budget"


def test_an_answer_by_a_grammar_begins_behind_the_reasoning(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [['{"a"', ": 1}"]]
    message = ask(client, "thinks", response_format={"type": "json_object"}).choices[0].message
    assert message.content == '{"a": 1}' and prompt_of(triton).endswith("<think>\n</think>\n\n")
