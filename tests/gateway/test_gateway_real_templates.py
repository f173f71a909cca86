"""Chat templates that users meet: the text is that of transformers for each of them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from shapeshift.serving.chat_templates.conversation import ChatTemplate
from tests import llama_cpp_source
from tests.gateway.test_gateway_chat_template import MESSAGES, by_transformers

pytestmark = pytest.mark.long
# Those of the models that are asked for most. The others of the archive are held to the same.
COMMON = (
    *("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
    *("Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "Qwen-QwQ-32B"),
    *("mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506", "google-gemma-2-2b-it"),
    *("google-gemma-4-31B-it", "microsoft-Phi-3.5-mini-instruct", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
    *("deepseek-ai-DeepSeek-V3.1", "openai-gpt-oss-120b", "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B"),
    *("ibm-granite-granite-3.3-2B-Instruct", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ASK = {"role": "user", "content": "In 2024 it was 50% {of} %s it, {0:9999}."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":"Paris","days":2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "sunny"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "größe", "parameters": PARAMETERS}}]
ANSWERED = [ASK, {"role": "assistant", "content": "Zwei.", "reasoning_content": "hm"}, {"role": "user", "content": "?"}]
CHATS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "user": ([ASK], None),
    "system": ([{"role": "system", "content": "Be brief."}, ASK], None),
    "developer": ([{"role": "developer", "content": "Be brief."}, ASK], None),
    "answered": (ANSWERED, None),
    "tools": ([ASK], TOOLS),
    "called": ([ASK, CALL, RESULT], TOOLS),
    "called, without tools": ([ASK, CALL, RESULT], None),
}
PARTS = [{"type": "text", "text": "hello there"}, {"type": "text", "text": "world"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    folder = llama_cpp_source.models() / "templates"
    return {file.stem: file.read_text() for file in sorted(folder.glob("*.jinja"))}


def test_the_common_ones_are_there(sources: dict[str, str]) -> None:
    assert len(COMMON) == 20 and set(COMMON) <= set(sources)


@pytest.mark.parametrize("chat", CHATS)
def test_the_text_is_that_of_transformers(chat: str, sources: dict[str, str]) -> None:
    messages, tools = CHATS[chat]
    for name, source in sources.items():
        template = ChatTemplate(source, TOKENS)
        try:
            expected = by_transformers(source, messages, tools=tools, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001  a template may raise whatever Python does
            with pytest.raises(type(error)) as raised:
                template.render(messages, tools)
            assert str(raised.value) == str(error), name
        else:
            assert template.render(messages, tools) == expected, name


def going_on(source: str, begun: Any, tokenizer: Any) -> set[str]:
    """What transformers makes of an answer that has begun so; nothing for a template that refuses it."""
    options: dict[str, Any] = {"chat_template": source, "tokenize": False, "continue_final_message": True}
    try:
        return {tokenizer.apply_chat_template([ASK, {"role": "assistant", "content": begun}], **options)}
    except Exception:  # noqa: BLE001  a template that refuses these messages, or does not write them
        return set()


@pytest.mark.parametrize("begun", ["Zwei", " Zwei und ", "<think>so", [{"type": "text", "text": "Zwei "}]])
def test_an_answer_goes_on_where_it_does_in_transformers(begun: Any, sources: dict[str, str], tokenizer: Any) -> None:
    messages, written = [ASK, {"role": "assistant", "content": begun}], 0
    for name, source in sources.items():
        expected = going_on(source, begun, tokenizer)
        if not isinstance(begun, str):
            # A template that reads no parts writes them as data: it gets their text.
            expected |= going_on(source, begun[0]["text"], tokenizer)
        if not expected:
            continue
        written += 1
        rendered = ChatTemplate(source, TOKENS).render(messages, None, continues=True)
        assert rendered in expected and "type" not in rendered.rpartition(ASK["content"])[2], name
    assert written > 20, written


@pytest.mark.parametrize("text", MESSAGES)
def test_messages_of_any_kind_are_written_as_in_transformers(
    text: str, sources: dict[str, str], tokenizer: Any
) -> None:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}, ASK]
    written = 0
    for name, source in sources.items():
        options: dict[str, Any] = {"chat_template": source, "tokenize": False, "add_generation_prompt": True}
        try:
            expected = tokenizer.apply_chat_template(messages, **options)
        except Exception:  # noqa: BLE001  a template that refuses these messages: see the test above
            continue
        written += 1
        assert ChatTemplate(source, TOKENS).render(messages, None) == expected, name
    assert written > 40


def test_parts_are_read_by_each_or_become_one_text(sources: dict[str, str], tokenizer: Any) -> None:
    for name, source in sources.items():
        joined = "\n".join(part["text"] for part in PARTS)
        texts = []
        for content in (PARTS, joined):
            options: dict[str, Any] = {"chat_template": source, "tokenize": False, "add_generation_prompt": True}
            try:
                texts.append(tokenizer.apply_chat_template([{"role": "user", "content": content}], **options))
            except Exception:  # noqa: BLE001  a template may raise whatever Python does
                texts.append("")
        if not any(texts):
            continue
        rendered = ChatTemplate(source, TOKENS).render([{"role": "user", "content": PARTS}], None)
        assert rendered in texts and "hello there" in rendered and "'text'" not in rendered, name
