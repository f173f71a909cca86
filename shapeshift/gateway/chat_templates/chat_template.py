"""Conversations as the text that a model was trained on: the chat template of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from shapeshift.errors import InvalidInputError
from shapeshift.gateway.chat_templates.limits import TemplateLimitError
from shapeshift.gateway.chat_templates.sandbox import ChatEnvironment

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 4096
_ENVIRONMENT = ChatEnvironment()


class ChatTemplate:
    """One Jinja template. `render` may be called from any thread.

    text: its source; special_tokens: texts by name, such as bos_token, that it may use.
    Raises InvalidInputError for a source that is no template.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self._length = len(text)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _ENVIRONMENT.from_string(text)
        except (TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise InvalidInputError("chat_template", text, f"a Jinja template: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt` it ends where the assistant's answer begins.

        messages: as in OpenAI's API; a content of several parts becomes one text, their texts with line breaks between.
        Raises InvalidInputError naming the message, or what the template refuses.
        """
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidInputError("messages", len(messages), f"1 to {MAX_MESSAGES} messages")
        chat = [_message(number, message) for number, message in enumerate(messages)]
        values = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        try:
            # Through JSON, so that the template sees nothing but plain values.
            values |= json.loads(json.dumps({"messages": chat, "tools": None if tools is None else list(tools)}))
            return _ENVIRONMENT.render(self._template, self._length, values)
        except TemplateLimitError as error:
            raise InvalidInputError("chat_template", "this conversation", str(error)) from None
        except TemplateError as error:
            raise InvalidInputError("messages", _roles(chat), f"the chat template refuses: {error}") from None
        except Exception as error:  # noqa: BLE001  a template may raise whatever Python does
            reason = f"the chat template fails: {type(error).__name__}: {error}"
            raise InvalidInputError("messages", _roles(chat), reason) from None


def _message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    field = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise InvalidInputError(field, message, "an object with role and content")
    if message.get("role") not in ROLES:
        raise InvalidInputError(f"{field}.role", message.get("role"), f"one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InvalidInputError(f"{field}.content", None, "a text, or parts of type text")
    # Templates ask whether there is a content: where a message only calls tools there is none.
    others = {name: value for name, value in message.items() if name != "content"}
    return others if content is None else {**others, "content": _text(f"{field}.content", content)}


def _text(field: str, content: Any) -> str:
    """A content as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidInputError(field, content, "a text, or parts of type text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidInputError(f"{field}[{number}]", kind, "a part of type text, with its text")
        texts.append(part["text"])
    return "\n".join(texts)


def _roles(chat: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(message["role"]) for message in chat)
