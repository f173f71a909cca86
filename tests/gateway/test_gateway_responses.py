"""OpenAI's API of responses through its client, of models whose answers a test states."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types import responses, shared_params
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

from shapeshift.errors import ModelError
from shapeshift.gateway.apis.generation.responses_request import FunctionTool, Item, Part, Reasoning, ResponsesRequest
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_gateway_turns import ANSWER, CALLS, NAMES, prompt_of, sampling_of, tokens, triton

__all__ = ["triton"]

TOOLS: Any = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}


def ask(client: openai.OpenAI, model: str, **more: Any) -> Any:
    return client.responses.create(model=model, **{"input": "hello you", **more})


def streamed(client: openai.OpenAI, model: str, **more: Any) -> tuple[Any, list[Any]]:
    """The last response of a stream, and its events."""
    events = list(ask(client, model, stream=True, **more))
    return events[-1].response, events


def items(response: Any) -> list[Any]:
    """What two answers have in common."""
    dropped = {"id", "call_id"}
    return [{name: value for name, value in one.to_dict().items() if name not in dropped} for one in response.output]


def test_a_text(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [["Hello ", "there"]] * 2
    more: dict[str, Any] = {"instructions": "Be short.", "temperature": 0.5, "top_p": 0.5, "max_output_tokens": 50}
    response = ask(client, "plain", **more, metadata={"a": "b"}, store=False, extra_body={"latency_ms": 2000})
    assert prompt_of(triton) == "<system>Be short.\n<user>hello you\n<assistant>"
    assert sampling_of(triton) == {
        "add_special_tokens": False,
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.5,
    }
    assert triton.calls[-1].parameters["latency_ms"] == 2000
    assert (response.output_text, response.status, response.metadata) == ("Hello there", "completed", {"a": "b"})
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (5, 2, 7)
    assert (response.temperature, response.instructions, response.store) == (0.5, "Be short.", False)
    together, events = streamed(client, "plain", **more)
    assert items(together) == items(response) and together.usage == response.usage
    assert [one.delta for one in events if one.type == "response.output_text.delta"] == ["Hello ", "there"]


def test_all_events_in_their_order(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [tokens("why</think>" + ANSWER)]
    response, events = streamed(client, "thinks", tools=TOOLS)
    assert [one.sequence_number for one in events] == [*range(len(events))]
    shown: list[Any] = []
    for one in events:
        step = (one.type.removeprefix("response."), getattr(one, "output_index", None))
        if shown[-1:] != [step]:
            shown.append(step)
    expected: list[Any] = [("created", None), ("in_progress", None)]
    for index, kind in enumerate(("reasoning_text", "output_text", *["function_call_arguments"] * 2)):
        part = "content_part." if "text" in kind else ""
        steps = [
            "output_item.added",
            f"{part}added",
            f"{kind}.delta",
            f"{kind}.done",
            f"{part}done",
            "output_item.done",
        ]
        expected += [(step, index) for step in steps if step not in ("added", "done")]
    assert shown == [*expected, ("completed", None)]
    ids = {one.item_id for one in events if hasattr(one, "item_id")}
    assert ids == {one.id for one in response.output}
    done = [one.arguments for one in events if one.type == "response.function_call_arguments.done"]
    assert [json.loads(one) for one in done] == [arguments for _, arguments in CALLS]


@pytest.mark.parametrize("model", ["hermes", "thinks"])
def test_tools_and_reasoning_are_the_same_in_a_stream(client: openai.OpenAI, triton: FakeTriton, model: str) -> None:
    triton.answers = [tokens(("why</think>" if model == "thinks" else "") + ANSWER)] * 3
    response = ask(client, model, tools=TOOLS)
    calls = [(one.name, json.loads(one.arguments)) for one in response.output if one.type == "function_call"]
    assert (calls, response.output_text, response.status) == (CALLS, "Look:", "completed")
    thoughts = [one.content[0].text for one in response.output if one.type == "reasoning"]
    assert thoughts == ["why"] * (model == "thinks")
    assert (response.usage.output_tokens_details.reasoning_tokens > 0) == (model == "thinks")
    together, _ = streamed(client, model, tools=TOOLS)
    assert items(together) == items(response)
    with client.responses.stream(model=model, input="hello you", tools=TOOLS) as stream:
        for _ in stream:
            pass
        assert [one.type for one in stream.get_final_response().output] == [one.type for one in response.output]


def test_an_answer_is_sent_back_with_results(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [tokens("why</think>" + ANSWER), ["It ", "rains."]]
    response = ask(client, "thinks", tools=TOOLS)
    results: list[Any] = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "rain"}
        for one in response.output
        if one.type == "function_call"
    ]
    results[1]["output"] = [{"type": "input_text", "text": "sun"}]
    user = [{"role": "user", "content": [{"type": "input_text", "text": "hello you"}]}]
    after = {"type": "message", "role": "user", "content": "So?"}
    answer = ask(client, "hermes", input=[*user, *response.output, *results, after], tools=TOOLS)
    assert prompt_of(triton).startswith(
        "<user>hello you\n<assistant>Look:\n<tool>rain\n<tool>sun\n<user>So?\n<assistant>"
    )
    assert answer.output_text == "It rains."


def test_an_answer_that_the_client_has_parsed_is_sent_back(client: openai.OpenAI, triton: FakeTriton) -> None:
    class City(BaseModel):
        name: str

    triton.answers = [tokens('{"name": "Rom"}'), tokens(ANSWER)]
    parsed = client.responses.parse(model="hermes", input="hello you", text_format=City)
    strict: Any = [{**tool, "strict": True} for tool in TOOLS]
    called = client.responses.parse(model="hermes", input="hello you", tools=strict)
    assert parsed.output_parsed == City(name="Rom")
    calls = [one.model_dump() for one in called.output]
    assert calls[1]["parsed_arguments"] == CALLS[0][1]
    ask(client, "hermes", input=[*parsed.output, *calls], tools=TOOLS)
    assert prompt_of(triton).startswith('<assistant>{"name": "Rom"}\n<assistant>Look:')


def test_choices_among_tools(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [tokens('{"name": "news", "arguments": {"a": 1}}'), tokens('{"a": 1}'), *[tokens(ANSWER)] * 2]
    for choice in ("required", {"type": "function", "name": "news"}):
        (call,) = ask(client, "plain", tools=TOOLS, tool_choice=choice).output
        assert (call.name, json.loads(call.arguments), call.status) == ("news", {"a": 1}, "completed")
    assert sampling_of(triton)["structured_outputs"] == {"json": {"type": "object"}}
    assert ask(client, "hermes", tools=TOOLS, tool_choice="none").output_text == ANSWER
    alone = ask(client, "hermes", tools=TOOLS, parallel_tool_calls=False)
    assert [one.type for one in alone.output] == ["message", "function_call"]


def test_an_answer_that_is_cut(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.answers = [["Hello ", "there"]] * 2
    response = ask(client, "plain", max_output_tokens=1)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    _, events = streamed(client, "plain", max_output_tokens=1)
    assert events[-1].type == "response.incomplete"


def test_schemas_and_efforts(client: openai.OpenAI, triton: FakeTriton) -> None:
    response = ask(client, "plain", text={"format": SCHEMA})
    assert sampling_of(triton)["structured_outputs"] == {"json": SCHEMA["schema"]}
    assert response.text.format.name == "n"
    ask(client, "plain", text={"format": {"type": "json_object"}})
    assert sampling_of(triton)["structured_outputs"] == {"json_object": True}
    ask(client, "efforts", reasoning={"effort": "high", "summary": "auto"}, include=["reasoning.encrypted_content"])
    assert prompt_of(triton).endswith("high")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_a"}, "previous_response_id"),
        ({"conversation": "conv_a"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": SCHEMA}, "tools": TOOLS, "tool_choice": "required"}, "text.format"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
def test_what_cannot_be_done_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={"model": "plain", "input": "a", **fields}, cast_to=object)
    assert refused.value.param == param and param in refused.value.message and refused.value.code


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        (ResponsesRequest, ResponseCreateParamsBase),
        (Reasoning, shared_params.Reasoning),
        (FunctionTool, responses.FunctionToolParam),
        (Item, responses.ResponseFunctionToolCallParam),
        (Item, responses.ResponseReasoningItemParam),
        (Item, responses.ResponseOutputMessageParam),
        (Part, responses.ResponseOutputTextParam),
        (Part, responses.ResponseInputTextParam),
    ],
)
def test_fields_of_the_client_are_served_or_refused_by_name(model: Any, sent: Any) -> None:
    assert sent.__annotations__.keys() <= {field.alias or name for name, field in model.model_fields.items()}


def test_errors_of_the_model(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.failure = ModelError("structured_outputs: got a schema that recurses; another one", "INVALID_ARG")
    for fields, param in (
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"text": {"format": SCHEMA}}, "text"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{param}.*: got a schema"):
            ask(client, "plain", **fields)
    triton.failure, triton.late_failure = None, ModelError("it broke", "INTERNAL")
    response, events = streamed(client, "plain")
    assert (events[-1].type, response.status, response.error.message) == ("response.failed", "failed", "it broke")
    assert events[-1].sequence_number == len(events) - 1
