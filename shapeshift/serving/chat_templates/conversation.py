"""A conversation in OpenAI's form as the text that a chat template makes of it.

Templates differ in what they read: a content as a text or as a list of parts, the arguments of a call as an object or
as JSON text, a message that only calls with an empty content, none, or without one. What a template reads is found by
rendering short conversations with it, once.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shapeshift.serving.chat_templates.environment import compiled, names_read

Message = Mapping[str, Any]
MAX_CHARACTERS = 1 << 22
"""Of a rendered text."""
# A text that no template writes by itself, and how it looks where a template writes a list of parts as it is.
_NEEDLE = "needle7q"
_PART_AS_DATA = re.compile(rf"""text["']\s*:\s*["']{_NEEDLE}""")
_TEXT, _PARTS = _NEEDLE, [{"type": "text", "text": _NEEDLE}]
# Some templates refuse ids of another length.
_CALL_ID = "call00000"
# The names of a message's reasoning, the one that most templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Behind a message that the answer goes on with: the prompt ends where it stands, as in transformers.
_END = "end7q"
# Options of the templates that are asked for most. Others that a template reads may be its own variables, or tools.
_OPTIONS = frozenset(
    (
        *("enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "thinking_mode", "thinking_effort"),
        *("thinking_option", "reasoning_strength", "add_thoughts", "skip_thinking", "include_thinking"),
        *("preserve_thinking", "keep_past_thinking", "clear_thinking", "drop_thinking", "truncate_history_thinking"),
        *("date_string", "current_date", "model_identity", "enable_citations", "add_vision_id"),
    )
)
_EFFORT, _SWITCHES = "reasoning_effort", ("enable_thinking", "thinking")


class ChatTemplate:
    """One template. special_tokens: texts by name, such as bos_token, that it may use.

    Every method raises what Jinja, or Python in its place, raises for a template that refuses, or fails.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._template = compiled(source)
        self._special_tokens = dict(special_tokens)
        self._written: dict[tuple[str, bool], bool] = {}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt` it ends where the assistant's answer begins.

        messages: as in OpenAI's API; the arguments of calls are JSON text. tools: None for a request without. options:
        see `options_of`. continues: it ends with the text of the last message instead.
        """
        if continues:
            messages = [*messages[:-1], _marked(messages[-1])]
        readable = [self._readable(one) for one in messages]
        text = self._render(readable, tools, add_generation_prompt and not continues, options or {})
        if not continues:
            return text
        begun, mark, rest = text.rpartition(_END)
        if not mark:
            raise TemplateError("the last message, which it does not write to its end")
        # A template that cuts the space behind the mark would have cut that of the text before it.
        return begun if rest.startswith(" ") else begun.rstrip()

    def options_of(self, options: Mapping[str, Any], reasoning_effort: str | None, thinks: bool) -> dict[str, Any]:
        """The options for `render`. Raises UnreadOptionError for those that the template does not read.

        Where the template has a switch for reasoning, an effort of none turns it off, and `thinks` on.
        """
        read = self._names_read & _OPTIONS
        if (unread := next((name for name in options if name not in read), None)) is not None:
            listed = f"what the chat template reads: {', '.join(sorted(read)) or 'no option'}"
            raise UnreadOptionError("chat_template_kwargs", unread, listed)
        chosen: dict[str, Any] = {}
        if reasoning_effort is not None and _EFFORT in read:
            chosen[_EFFORT] = reasoning_effort
        if reasoning_effort == "none":
            chosen |= dict.fromkeys(read.intersection(_SWITCHES), False)
        elif reasoning_effort is not None and not chosen:
            raise UnreadOptionError(_EFFORT, reasoning_effort, "none: the model's chat template has no efforts")
        elif thinks:
            chosen |= dict.fromkeys(read.intersection(_SWITCHES), True)
        return {**chosen, **options}

    @functools.cached_property
    def _names_read(self) -> frozenset[str]:
        return names_read(self._source)

    def _readable(self, message: Message) -> dict[str, Any]:
        """The message in the form that the template reads."""
        # As in transformers: templates ask whether a field is there, not whether it is none.
        readable = {name: value for name, value in message.items() if value is not None}
        if readable.get("tool_calls") and not readable.get("content"):
            readable.pop("content", None)
        if "content" in readable:
            readable["content"] = self._content(str(message.get("role")), readable["content"])
        if readable.get("tool_calls"):
            without_content, reads_objects = self._form_of_calls
            readable = {**without_content, **readable}
            if reads_objects:
                readable["tool_calls"] = [_with_object(call) for call in readable["tool_calls"]]
        reasoning = next((readable[name] for name in _REASONING if name in readable), None)
        if reasoning is not None:
            readable = {"thinking": reasoning, **readable, "reasoning_content": reasoning}
        return readable

    def _content(self, role: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        is_text = isinstance(content, str)
        if self._writes(role, as_text=is_text) or not self._writes(role, as_text=not is_text):
            return content
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return "\n".join(part["text"] for part in content)

    def _writes(self, role: str, as_text: bool) -> bool:
        """Whether the template writes the text of a message of this role, given as a text or as a list of parts."""
        if (role, as_text) not in self._written:
            text = self._tried(self._example(role, _TEXT if as_text else _PARTS))
            is_written = _NEEDLE in text and not (_PART_AS_DATA.search(text) and not as_text)
            self._written[role, as_text] = is_written
        return self._written[role, as_text]

    def _example(self, role: str, content: Any) -> list[dict[str, Any]]:
        """A short conversation with a message of this role."""
        message = {"role": role, "content": content}
        if role == "user":
            return [message]
        user = {"role": "user", "content": self._content("user", "a")}
        if role in ("system", "developer"):
            return [message, user]
        if role == "tool":
            without_content, reads_objects = self._form_of_calls
            call = _call(without_content, {} if reads_objects else "{}")
            return [user, call, {**message, "tool_call_id": _CALL_ID, "name": "f"}]
        return [user, message, user]

    @functools.cached_property
    def _form_of_calls(self) -> tuple[dict[str, Any], bool]:
        """What a message that only calls says of its content, and whether arguments are read as objects.

        The first form in which the template writes a call; if it writes none, the first one that it takes.
        """
        user = {"role": "user", "content": self._content("user", "a")}
        result = {"role": "tool", "tool_call_id": _CALL_ID, "name": "f", "content": "a"}
        arguments = {"k": _NEEDLE}
        contents: list[dict[str, Any]] = [{}, {"content": ""}, {"content": None}]
        taken = None
        # Some read a message otherwise where it is the last one; others have no results.
        for end, content, reads_objects in itertools.product(([result], []), contents, (True, False)):
            text = self._tried([user, _call(content, arguments if reads_objects else json.dumps(arguments)), *end])
            if _NEEDLE in text:
                return content, reads_objects
            if text and taken is None:
                taken = content, reads_objects
        return taken or ({}, True)

    def _tried(self, messages: Sequence[Message]) -> str:
        """The text of an example; empty for one that the template refuses."""
        try:
            return self._render(messages, None, add_generation_prompt=True, options={})
        except Exception:  # noqa: BLE001  a template may raise whatever Python does
            return ""

    def _render(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        values = {"messages": messages, "tools": tools, "documents": None}
        values["add_generation_prompt"] = add_generation_prompt
        return "".join(_bounded(self._template.generate({**self._special_tokens, **options, **values})))


class TemplateError(Exception):
    """Why a template makes no text of a conversation."""


class UnreadOptionError(TemplateError):
    """An option that a template does not read: the field that states it, its name or value, and what is allowed."""


def _call(content: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """A message that calls a tool, with this content."""
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", **content, "tool_calls": [call]}


def _marked(message: Message) -> dict[str, Any]:
    """The message with a mark and a space behind its text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}{_END} "}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": f"{last['text']}{_END} "}]}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object; other text than JSON's of an object stays what a model once wrote."""
    function = dict(call["function"])
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def _bounded(parts: Iterator[str]) -> Iterator[str]:
    length = 0
    for part in parts:
        length += len(part)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"the text is longer than {MAX_CHARACTERS} characters")
        yield part
