"""Answers that go on with a message, prompts without an answer, and what was computed before, in each API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import TEMPLATE, FakeTriton, with_templates
from tests.gateway.test_gateway_turns import ASK, TEMPLATES, TOOLS, prompt_of, sampling_of, tokens

CLOSES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORMS = {
    "closes": CLOSES,
    "trims": CLOSES.replace("m.content", "m.content | trim"),
    "leaves out": CLOSES.replace("m.content", "m.content[:3]"),
    "thinks": CLOSES + "{# <think></think> <tool_call> #}",
    "harmony": CLOSES + "{# <|channel|><|start|> #}",
}
BEGUN: Any = {"role": "assistant", "content": "It is "}
PROMPT = "<user>hello you</s><assistant>It is"
CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton(with_templates({**FORMS, "plain": TEMPLATE, "hermes": TEMPLATES["hermes"]}))


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def go_on(client: openai.OpenAI, model: str, last: Any = BEGUN, **more: Any) -> Any:
    fields = {"extra_body": CONTINUES, **more}
    return client.chat.completions.create(model=model, messages=[*ASK, last], **fields)


@pytest.mark.parametrize(
    ("model", "last", "end"),
    [
        ("closes", BEGUN, " "),
        ("closes", {**BEGUN, "content": [{"type": "text", "text": "It"}, {"type": "text", "text": " is "}]}, " "),
        ("trims", BEGUN, ""),
    ],
)
def test_a_chat_goes_on_with_its_last_message(
    client: openai.OpenAI, triton: FakeTriton, model: str, last: Any, end: str
) -> None:
    triton.answers = [["so", "."]]
    answer = go_on(client, model, last)
    assert answer.choices[0].message.content == "so." and answer.choices[0].message.role == "assistant"
    assert prompt_of(triton).replace("\n", "") == PROMPT + end


def test_a_chat_without_the_beginning_of_an_answer(client: openai.OpenAI, triton: FakeTriton) -> None:
    go_on(client, "closes", ASK[0], extra_body={"add_generation_prompt": False})
    assert prompt_of(triton).endswith("<user>hello you</s>")


@pytest.mark.parametrize(
    ("last", "fields", "param"),
    [
        (BEGUN, {**CONTINUES, "add_generation_prompt": True}, "continue_final_message"),
        (ASK[0], CONTINUES, "messages"),
        ({"role": "assistant", "content": ""}, CONTINUES, "messages"),
    ],
)
def test_what_no_answer_goes_on_with(client: openai.OpenAI, last: Any, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        go_on(client, "closes", last, extra_body=fields)
    assert (refused.value.code, refused.value.param) == ("invalid_value", param)


def test_a_template_that_cuts_the_message_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not write to its end") as refused:
        go_on(client, "leaves out")
    assert refused.value.param == "messages"


def test_an_answer_goes_on_within_reasoning_or_behind_it(client: openai.OpenAI, triton: FakeTriton) -> None:
    for begun, thought, said in (("<think>so", "and so", "Yes."), ("<think>so</think>I", None, "and so</think>Yes.")):
        triton.answers = [["and so", "</think>", "Yes."]]
        message = go_on(client, "thinks", {**BEGUN, "content": begun}).choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content) == (thought, said)
    triton.answers = [tokens("fine.")]
    assert go_on(client, "harmony").choices[0].message.content == "fine."
    triton.answers = [["{", "}"]]
    go_on(client, "harmony", response_format={"type": "json_object"})
    assert prompt_of(triton).endswith("It is ")


@pytest.mark.parametrize("content", ["It is ", [{"type": "text", "text": "It is "}]])
def test_a_message_goes_on_as_anthropic_has_it(claude: anthropic.Anthropic, triton: FakeTriton, content: Any) -> None:
    triton.answers = [["so", "."]]
    messages: Any = [*ASK, {"role": "assistant", "content": content}]
    answer: Any = claude.messages.create(model="closes", max_tokens=9, messages=messages)
    assert answer.content[0].text == "so." and prompt_of(triton) == f"{PROMPT} "


def test_a_prompt_is_shown_and_counted_without_an_answer(url: str, client: openai.OpenAI, triton: FakeTriton) -> None:
    body = {"model": "closes", "messages": [{"role": "system", "content": "a b"}, *ASK]}
    shown = HTTP.post(f"{url}/apply-template", json=body).json()
    assert shown == {"prompt": "<system>a b</s><user>hello you</s><assistant>"} and triton.calls == []
    going = HTTP.post(f"{url}/apply-template", json={**body, "messages": [*ASK, BEGUN], **CONTINUES})
    assert going.json() == {"prompt": f"{PROMPT} "}
    counted = HTTP.post(f"{url}/v1/chat/completions/input_tokens", json=body).json()
    assert counted["input_tokens"] == len(shown["prompt"].split())
    response = client.responses.input_tokens.count(model="closes", instructions="a b", input=ASK)
    assert (response.object, response.input_tokens) == ("response.input_tokens", counted["input_tokens"])
    assert {call.outputs for call in triton.calls} == {("TOKENS",)}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(model="closes", input="a", previous_response_id="b")
    assert refused.value.param == "previous_response_id"


def test_tokens_that_were_computed_before_are_told(
    client: openai.OpenAI, claude: anthropic.Anthropic, triton: FakeTriton
) -> None:
    triton.cached = 1
    chat = client.chat.completions.create(model="closes", messages=ASK, n=2)
    assert chat.usage and chat.usage.prompt_tokens_details and chat.usage.prompt_tokens_details.cached_tokens == 1
    text = client.completions.create(model="closes", prompt=["a b", "c d"])
    assert text.usage and text.usage.prompt_tokens_details and text.usage.prompt_tokens_details.cached_tokens == 2
    response = client.responses.create(model="closes", input="a b c")
    assert response.usage and response.usage.input_tokens_details.cached_tokens == 1
    message = claude.messages.create(model="closes", max_tokens=9, messages=ASK).usage
    assert (message.input_tokens, message.cache_read_input_tokens) == (chat.usage.prompt_tokens - 1, 1)
    assert message.cache_creation_input_tokens == 0
    triton.cached = None
    untold = client.chat.completions.create(model="closes", messages=ASK)
    assert untold.usage and untold.usage.prompt_tokens_details is None


@pytest.mark.parametrize("model", ["closes", "thinks"])
def test_the_prompt_of_a_chat_is_scored(client: openai.OpenAI, triton: FakeTriton, model: str) -> None:
    extra = {"extra_body": {"prompt_logprobs": 2}}
    answer = client.chat.completions.create(model=model, messages=ASK, n=2, **extra)
    assert sampling_of(triton)["prompt_logprobs"] == 2
    scored = answer.model_dump()["prompt_logprobs"]
    assert [one and one["7"]["decoded_token"] for one in scored] == [None, *prompt_of(triton).split()[1:]]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=ASK, stream=True, **extra)
    assert refused.value.param == "prompt_logprobs"
    assert "prompt_logprobs" not in client.chat.completions.create(model=model, messages=ASK).model_dump()


def test_a_schema_that_refers_to_itself_does_so_among_others(client: openai.OpenAI, triton: FakeTriton) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "enum": {"$ref": "#/$defs/text"}}}
    schema = {**node, "$defs": {"text": {"enum": [{"$ref": "#"}]}}}
    tool: Any = {"type": "function", "function": {"name": "walk", "parameters": schema}}
    triton.answers = [["{", "}"]] * 2
    client.chat.completions.create(model="hermes", messages=ASK, tools=[*TOOLS, tool], tool_choice="required")
    place = "#/anyOf/2/properties/arguments"
    grammar = sampling_of(triton)["structured_outputs"]["json"]
    for deepest, allows in (("{}", True), ('{"name": "walk"}', False)):
        text = f'{{"name": "walk", "arguments": {{"next": {{"next": {deepest}}}}}}}'.encode()
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(grammar))
        assert (matcher.validate_tokens([*text]) == len(text)) is allows
    arguments = grammar["anyOf"][2]["properties"]["arguments"]
    assert arguments["properties"] == {"next": {"$ref": place}, "enum": {"$ref": f"{place}/$defs/text"}}
    assert arguments["$defs"] == {"text": {"enum": [{"$ref": "#"}]}}, "what is no schema stays as it is"
    client.chat.completions.create(model="hermes", messages=ASK, tools=[tool], tool_choice="required")
    assert sampling_of(triton)["structured_outputs"]["json"]["properties"] == node["properties"]
