"""A conversation, whichever API it came by, and the prompt that a model's chat template makes of it.

A template comes with a checkpoint, and what it does depends on the text of users: one filter of Jinja may compute for
many seconds without giving way to other threads. So it runs in processes of its own, which can be ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.errors import ApiError, invalid, overloaded
from shapeshift.gateway.template_process import MEMORY_BYTES, TemplateProcess
from shapeshift.serving.chat_templates.conversation import TemplateError, UnreadOptionError

# One template that takes its whole time holds up no other conversation.
_PROCESSES = 2
# Times `max_seconds` that a conversation waits for others.
_PATIENCE = 6


AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True)
class Conversation:
    """What an API makes of its request.

    messages     as chat templates know them, in the form of OpenAI's chat API: role, content, tool_calls and the like
    tools        in the form of that API, as the request has them
    tool_choice  AUTO: the model may call tools; NONE: it is not shown any; REQUIRED: it has to call one; or the name of
                 the tool that it has to call
    parallel     whether it may call several at once
    options      what else the template reads
    reasoning_effort, thinking_budget  how much the model thinks, in a word of the template's and in tokens
    thinks       whether reasoning is turned on where the template has a switch
    add_generation_prompt  whether the text ends where the answer begins
    continues    whether the answer goes on with the last message

    Raises ApiError for a tool that stands there twice, a choice of none of the tools, a result of no call, and a last
    message that no answer goes on with.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = AUTO
    parallel: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    thinks: bool = False
    add_generation_prompt: bool = True
    continues: bool = False

    def __post_init__(self) -> None:
        names = Counter(tool["function"]["name"] for tool in self.tools)
        if (twice := next((name for name, count in names.items() if count > 1), None)) is not None:
            raise invalid("tools", twice, "each name once")
        if self.tool_choice not in (AUTO, NONE, *((REQUIRED,) if names else ()), *names):
            raise invalid("tool_choice", self.tool_choice, "auto, none, required where there are tools, or one of them")
        calls: set[str] = set()
        for place, message in enumerate(self.messages):
            calls.update(call["id"] for call in message.get("tool_calls") or ())
            answered = message.get("tool_call_id") if message.get("role") == "tool" else None
            if answered is not None and answered not in calls:
                field = f"messages[{place}].tool_call_id"
                raise invalid(field, answered, "the id of a call in a message before")
        last = self.messages[-1]
        if self.continues and (last["role"] != "assistant" or last.get("tool_calls") or not last.get("content")):
            raise invalid("messages", last["role"], "at its end a text of the assistant's that the answer goes on with")

    @property
    def begun(self) -> str:
        """What the answer goes on with; empty: it begins."""
        content = self.messages[-1]["content"] if self.continues else ""
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schema of the parameters of each tool that may be called, by name."""
        if self.tool_choice == NONE:
            return {}
        functions = (tool["function"] for tool in self.tools)
        schemas = {one["name"]: one.get("parameters") or {"type": "object", "properties": {}} for one in functions}
        return schemas if self.tool_choice in (AUTO, REQUIRED) else {self.tool_choice: schemas[self.tool_choice]}


class ChatRenderer:
    """Two processes that render. They start with `start` or the first calls of `prompt`, and again after an end.

    max_seconds: for one rendering; ordinary ones take milliseconds.
    """

    def __init__(self, max_seconds: float = 10.0) -> None:
        self._max_seconds = max_seconds
        self._processes = [TemplateProcess() for _ in range(_PROCESSES)]
        # The last one first: it has the template, and the processor has both.
        self._idle: asyncio.LifoQueue[TemplateProcess] = asyncio.LifoQueue()
        for process in self._processes:
            self._idle.put_nowait(process)

    def start(self) -> None:
        """Start the processes, so that the first conversation does not wait for them. Raises OSError."""
        for process in self._processes:
            process.start()

    async def prompt(self, target: Target, chat: Conversation) -> str:
        """The text of a conversation by the model's template, see `ChatTemplate.render`.

        Raises ApiError for a model without one, and where others take too long; InvalidInputError for what the template
        refuses, and beyond the limits of time, memory and length; EngineError where no process can be started.
        """
        description, tools = target.front.description, chat.tools if chat.tool_choice != NONE else ()
        source = (description.get("tool_use_template") if tools else None) or description.get("chat_template")
        if not source:
            reason = (
                f"model: the checkpoint of {target.name} has no chat template: use /v1/completions, or put a"
                " chat_template.jinja into the folder of the checkpoint and build the model again"
            )
            raise ApiError(400, reason, param="model", code="model_not_supported")
        special_tokens, options = description.get("special_tokens") or {}, (chat.options, chat.reasoning_effort)
        end = chat.thinks, chat.add_generation_prompt, chat.continues
        try:
            return await self._rendered(str(source), special_tokens, chat.messages, tools or None, *options, *end)
        except UnreadOptionError as error:
            raise invalid(*error.args) from None
        except TemplateError as error:
            allowed = f"what the model's chat template takes: {error}"
        except TimeoutError:
            allowed = f"what the model's chat template renders within {self._max_seconds:g} s"
        except ConnectionError:
            allowed = f"what the model's chat template renders within {MEMORY_BYTES >> 20} MiB"
        except OSError as error:
            raise EngineError(f"chat template: its process cannot be started: {error}") from None
        roles = ", ".join(str(message.get("role")) for message in chat.messages)
        raise InvalidInputError("messages", roles, allowed)

    async def _rendered(self, *arguments: Any) -> str:
        try:
            async with asyncio.timeout(_PATIENCE * self._max_seconds):
                process = await self._idle.get()
        except TimeoutError:
            raise overloaded("chat template: other conversations take all the time; retry later") from None
        try:
            try:
                return await process.render(arguments, self._max_seconds)
            except ConnectionError:
                # It may have ended while it had nothing to do.
                return await process.render(arguments, self._max_seconds)
        finally:
            self._idle.put_nowait(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()
