"""The bodies of /v1/messages, and the conversations that they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from shapeshift.gateway.apis.fields import (
    ITEMS,
    OF_TEXT,
    TEXT,
    ApiRequest,
    Int32,
    JsonObject,
    ModelRequest,
    Strings,
    bounded,
    not_served,
    text_or_items,
)
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.conversation import AUTO, NONE, REQUIRED, Conversation
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.generation import GenerationCall

_MOST_MESSAGES = 4096
# The fields that a block of a type needs, and the blocks that a role may have.
_NEEDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_BLOCKS_OF = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
# Context managements that leave all as it is, of which coding tools send the last one.
_KEEPS: Sequence[dict[str, Any]] = (
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)
_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}


class Block(ApiRequest):
    """A part of a message. What is cached, cited or signed changes no answer, nor whether a result is an error."""

    type: Annotated[Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"], OF_TEXT]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: Content | None = None
    cache_control: Any = None
    caller: Any = None
    citations: Annotated[Any, not_served([])] = None
    data: str | None = None
    is_error: bool | None = None
    signature: str | None = None
    toolset_name: Annotated[Any, not_served()] = None

    @model_validator(mode="after")
    def _has_its_fields(self) -> Block:
        if (missing := next((name for name in _NEEDS[self.type] if getattr(self, name) is None), None)) is not None:
            raise PydanticCustomError("incomplete", "a block with its {field}", {"field": missing})
        if isinstance(self.content, list) and any(one.type != "text" for one in self.content):
            raise PydanticCustomError("result", "a result whose content is a text, or blocks of type text")
        return self

    def called(self) -> dict[str, Any]:
        """The function of a block of type tool_use."""
        return {"name": self.name, "arguments": orjson.dumps(self.input).decode()}


Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[Annotated[list[Block], bounded()], Tag(ITEMS)],
    Discriminator(text_or_items, custom_error_type="form", custom_error_message="a text, or a list of blocks"),
]
Block.model_rebuild()


class MessageParam(ApiRequest):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> MessageParam:
        allowed = _BLOCKS_OF[self.role]
        if isinstance(self.content, list) and any(block.type not in allowed for block in self.content):
            words = {"role": self.role, "types": ", ".join(allowed)}
            raise PydanticCustomError("blocks", "of the role {role} only blocks of type {types}", words)
        return self

    def for_template(self) -> Iterator[dict[str, Any]]:
        """The message as chat templates know it: one for each result, and the texts between them."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
        elif self.role == "assistant":
            yield _said(self.content)
        else:
            texts: list[Block] = []
            for block in self.content:
                if block.type == "text":
                    texts.append(block)
                    continue
                if texts:
                    yield {"role": self.role, "content": _texts(texts)}
                    texts = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _texts(block.content or "")}
            if texts or not self.content:
                yield {"role": self.role, "content": _texts(texts)}


def _said(blocks: Sequence[Block]) -> dict[str, Any]:
    texts = [block for block in blocks if block.type == "text"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    calls = [{"id": one.id, "type": "function", "function": one.called()} for one in blocks if one.type == "tool_use"]
    message: dict[str, Any] = {"role": "assistant"}
    if texts or not calls:
        message["content"] = _texts(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _texts(content: str | Sequence[Block]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [{"type": "text", "text": block.text or ""} for block in content]
    return parts if len(parts) > 1 else "".join(part["text"] for part in parts)


class ToolParam(ApiRequest):
    """A tool of the client's. strict: accepted; a call that has to be made always follows the schema."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: JsonObject
    allowed_callers: Annotated[Any, not_served(["direct"])] = None
    cache_control: Any = None
    defer_loading: Annotated[Any, not_served(False)] = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[Any, not_served([])] = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """The tool in OpenAI's form, which templates read."""
        described = {"description": self.description} if self.description is not None else {}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(ApiRequest):
    """Whether the model may call tools, has to, or has to call the one of this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiRequest):
    """How much the model thinks."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Int32, Field(ge=1)] | None = None
    display: Annotated[Any, not_served("summarized")] = None


class OutputFormat(ApiRequest):
    """A schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(ApiRequest):
    """What the answer has to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(ModelRequest):
    """A conversation whose tokens are counted."""

    made_of: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("text_input", "input_ids", "input_lengths", "messages"), "messages"),
        "thinking_token_budget": "thinking.budget_tokens",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    messages: Annotated[list[MessageParam], bounded(1, _MOST_MESSAGES)]
    system: Content | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[ToolParam], bounded()] | None = None
    output_config: OutputConfig | None = None
    # They say who asks, or how the service is paid or cached, and change no answer.
    cache_control: Any = None
    inference_geo: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Not served.
    container: Annotated[Any, not_served()] = None
    context_management: Annotated[Any, not_served(*_KEEPS)] = None
    diagnostics: Annotated[Any, not_served()] = None
    mcp_servers: Annotated[Any, not_served([])] = None
    speed: Annotated[Any, not_served("standard")] = None
    thread: Any = None

    def field_of(self, name: str) -> str:
        """As of every request; a grammar is made of the format of the answer, or of the tools."""
        if name == "structured_outputs":
            return "output_config.format" if self._schema is not None else "tools"
        return super().field_of(name)

    @property
    def _schema(self) -> dict[str, Any] | None:
        form = self.output_config.format if self.output_config is not None else None
        return None if form is None else form.schema_

    def chat(self) -> Conversation:
        """What all APIs make of a request. Raises as Conversation, and ApiError for what a field lacks."""
        if self.thread is not None:
            # Anthropic's client knows the code: it goes on with all messages in each request.
            reason = "thread: this gateway holds no conversations; leave it out"
            raise ApiError(400, reason, param="thread", code="thread_unsupported_request")
        system = MessageParam(role="system", content=self.system) if self.system else None
        messages = [*([system] if system else ()), *self.messages]
        choice, thinking = self.tool_choice, self.thinking
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise invalid("tool_choice.name", None, "given where type is tool", "missing_parameter")
        if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
            raise invalid("thinking.budget_tokens", None, "given where type is enabled", "missing_parameter")
        effort = self.output_config.effort if self.output_config is not None else None
        return Conversation(
            [one for message in messages for one in message.for_template()],
            [tool.for_template() for tool in self.tools or ()],
            AUTO if choice is None else _CHOICES.get(choice.type, choice.name or ""),
            choice is None or not choice.disable_parallel_tool_use,
            reasoning_effort="none" if thinking is not None and thinking.type == "disabled" else effort,
            thinking_budget=None if thinking is None else thinking.budget_tokens,
            thinks=thinking is not None and thinking.type == "enabled",
            continues=messages[-1].role == "assistant",
        )

    def call(self, target: Target) -> GenerationCall:
        """The call of the model, without its prompt. Raises ApiError for contradictions."""
        return self._call(target, {"max_tokens": 1}, stream=False)

    def _call(self, target: Target, sampling: dict[str, Any], stream: bool) -> GenerationCall:
        if self._schema is not None:
            sampling["structured_outputs"] = {"json": self._schema}
        return GenerationCall(
            target=target,
            sampling=sampling,
            stream=stream,
            parameters=self.request_parameters(),
        )


class MessagesRequest(CountRequest):
    """Anthropic's, with the request parameters of the generator."""

    max_tokens: Annotated[Int32, Field(ge=1)]
    stop_sequences: Strings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None

    def call(self, target: Target) -> GenerationCall:
        """As of CountRequest, for a whole answer."""
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise invalid("thinking.budget_tokens", budget, f"below max_tokens, which is {self.max_tokens}")
        names = ("max_tokens", "temperature", "top_k", "top_p")
        sampling = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            sampling["stop"] = self.stop_sequences
        return self._call(target, sampling, bool(self.stream))
