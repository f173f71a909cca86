"""Bad tools, budgets, templates and parts: each API refuses them in its own shape, by the name of its own field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shapeshift.errors import ModelError
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import TEMPLATE, FakeTriton, with_templates
from tests.gateway.test_gateway_messages import SWITCH
from tests.gateway.test_gateway_turns import TEMPLATES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)
RAISES = TEMPLATE + "{{ raise_exception('no such role') }}"
SCHEMA = {"type": "object", "properties": {}}
TEXTS = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton(with_templates({**TEMPLATES, "switch": SWITCH, "raises": RAISES}))


def refusal(url: str, route: str, model: str, **fields: Any) -> tuple[int, str, str | None]:
    """The status, the code and the field of an error in the shape of the route's API."""
    asked: dict[str, dict[str, Any]] = {CHAT: TEXTS, RESPONSES: {"input": "a"}, MESSAGES: {**TEXTS, "max_tokens": 100}}
    answer = HTTP.post(f"{url}{route}", json={"model": model, **asked[route], **fields})
    body = answer.json()
    if route == MESSAGES:
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error"), body
        details = body["error"]["details"]
        return answer.status_code, details["error_code"], details["param"]
    assert body["error"]["type"] == "invalid_request_error", body
    return answer.status_code, body["error"]["code"], body["error"]["param"]


def tools(route: str, *names: str) -> list[dict[str, Any]]:
    made: dict[str, Callable[[str], dict[str, Any]]] = {
        CHAT: lambda name: {"type": "function", "function": {"name": name, "parameters": SCHEMA}},
        RESPONSES: lambda name: {"type": "function", "name": name, "parameters": SCHEMA},
        MESSAGES: lambda name: {"name": name, "input_schema": SCHEMA},
    }
    return [made[route](name) for name in names]


@pytest.mark.parametrize("route", APIS)
def test_tools_that_cannot_be_given(url: str, route: str) -> None:
    assert refusal(url, route, "hermes", tools=tools(route, "f", "f")) == (400, "invalid_value", "tools")
    assert refusal(url, route, "plain", tools=tools(route, "f")) == (400, "model_not_supported", "tools")
    many = tools(route, *(f"f{number}" for number in range(2049)))
    assert refusal(url, route, "hermes", tools=many) == (400, "invalid_value", "tools")


@pytest.mark.parametrize("route", APIS)
def test_a_schema_that_no_grammar_is_made_of(url: str, triton: FakeTriton, route: str) -> None:
    choice: Any = {"type": "any"} if route == MESSAGES else "required"
    triton.failure = ModelError("structured_outputs json: got '{}'; a schema that can be compiled", "INVALID_ARG")
    asked = refusal(url, route, "hermes", tools=tools(route, "f"), tool_choice=choice)
    assert asked == (400, "invalid_value", "tools")


RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "b"}]}, "messages[0].tool_call_id"),
    RESPONSES: ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
    MESSAGES: (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}]},
        "messages",
    ),
}


@pytest.mark.parametrize("route", APIS)
def test_a_result_of_no_call(url: str, route: str) -> None:
    fields, param = RESULTS[route]
    assert refusal(url, route, "hermes", **fields) == (400, "invalid_value", param)


@pytest.mark.parametrize("route", APIS)
def test_a_template_that_raises(url: str, route: str) -> None:
    param = "input" if route == RESPONSES else "messages"
    assert refusal(url, route, "raises") == (400, "invalid_value", param)


BUDGETS: list[tuple[str, str, dict[str, Any], str]] = [
    (CHAT, "plain", {"thinking_token_budget": 10**9}, "thinking_token_budget"),
    (CHAT, "switch", {"thinking_token_budget": -1}, "thinking_token_budget"),
    (CHAT, "switch", {"thinking_token_budget": 10**10}, "thinking_token_budget"),
    (CHAT, "switch", {"thinking_token_budget": 5, "n": 2}, "thinking_token_budget"),
    (RESPONSES, "switch", {"max_output_tokens": 0}, "max_output_tokens"),
    (MESSAGES, "switch", {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    (MESSAGES, "switch", {"thinking": {"type": "enabled", "budget_tokens": 10**9}}, "thinking.budget_tokens"),
    (MESSAGES, "switch", {"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    (MESSAGES, "plain", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
]


@pytest.mark.parametrize(("route", "model", "fields", "param"), BUDGETS)
def test_budgets(url: str, route: str, model: str, fields: dict[str, Any], param: str) -> None:
    code = "missing_parameter" if fields.get("thinking") == {"type": "enabled"} else "invalid_value"
    assert refusal(url, route, model, **fields) == (400, code, param)


def test_a_budget_of_nothing_or_of_more_than_there_is_room_for(url: str, triton: FakeTriton) -> None:
    for budget, reasoning in ((0, 1), (10**9, 3)):
        triton.answers = [["I ", "think", "</think>", "Six."], ["Six."]]
        body = {"model": "switch", "thinking_token_budget": budget, "chat_template_kwargs": {"enable_thinking": True}}
        answer = HTTP.post(f"{url}{CHAT}", json={**TEXTS, **body}).json()
        assert answer["choices"][0]["message"]["content"] == "Six."
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning


def said(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}


def read(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, part]}]}


SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA"}
PARTS: list[tuple[str, dict[str, Any], str]] = [
    (
        CHAT,
        said({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
        "messages[0].content[1].type",
    ),
    (CHAT, said({"type": "input_audio", "input_audio": {"data": "AA"}}), "messages[0].content[1].type"),
    (RESPONSES, read({"type": "input_image", "image_url": "https://a.b/c.png"}), "input[0].content[1].type"),
    (RESPONSES, read({"type": "input_file", "file_id": "a"}), "input[0].content[1].type"),
    (MESSAGES, said({"type": "image", "source": SOURCE}), "messages[0].content[1].type"),
    (MESSAGES, said({"type": "document", "source": SOURCE}), "messages[0].content[1].type"),
    (
        MESSAGES,
        said({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": SOURCE}]}),
        "messages[0].content[1].content[0].type",
    ),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
]


@pytest.mark.parametrize(("route", "fields", "param"), PARTS)
def test_what_no_model_reads(url: str, route: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(url, route, "plain", **fields) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize("value", [{}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}])
def test_a_context_that_is_not_edited(url: str, value: dict[str, Any]) -> None:
    body = {"model": "plain", "max_tokens": 9, **TEXTS, "context_management": value, "metadata": {"user_id": "a"}}
    assert HTTP.post(f"{url}{MESSAGES}", json=body).status_code == 200
