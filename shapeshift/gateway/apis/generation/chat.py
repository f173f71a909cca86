"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from shapeshift.gateway.answers.pieces import ArgumentsPiece, CallBegun, Piece, ReasoningPiece, TextPiece
from shapeshift.gateway.answers.turn import Answer, Turn, begin
from shapeshift.gateway.apis.fields import (
    ITEMS,
    OF_TEXT,
    TEXT,
    ApiRequest,
    Int32,
    JsonObject,
    OfClient,
    SaidPart,
    bounded,
    not_served,
    text_or_items,
)
from shapeshift.gateway.apis.generation.sampling import SamplingRequest
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.conversation import AUTO, Conversation
from shapeshift.gateway.endpoint import BodyRoute, Context, event
from shapeshift.gateway.errors import invalid
from shapeshift.gateway.generation import GenerationCall, TokenEntries, likeliest

router = APIRouter(route_class=BodyRoute, tags=["chat"])

_MOST_MESSAGES = 4096


class ContentPart(SaidPart):
    """A part of a message. cache_control: accepted; clients mark what others are to cache."""

    type: Annotated[Literal["text", "refusal"], OF_TEXT]
    cache_control: Any = None


class FunctionCall(ApiRequest):
    """What an assistant's message calls."""

    name: str
    arguments: str
    parsed_arguments: OfClient = None


class ToolCall(ApiRequest):
    """One call of an assistant's message. index: of a call that a client has put together from a stream."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: OfClient = None


_CONTENT = "a text, or a list of parts of type text"
Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[Annotated[list[ContentPart], bounded()], Tag(ITEMS)],
    Discriminator(text_or_items, custom_error_type="form", custom_error_message=_CONTENT),
]


class Message(ApiRequest):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    # What a model thought before its answer, by the names that servers give it.
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], bounded()] | None = None
    parsed: OfClient = None
    # What OpenAI's client writes out of an answer that has none.
    annotations: Annotated[OfClient, not_served([])] = None
    audio: Annotated[Any, not_served()] = None
    function_call: Annotated[Any, not_served()] = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise PydanticCustomError("no_content", f"content: {_CONTENT}")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: what it has of role, content, calls and the like."""
        values = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            values["content"] = [{"type": "text", "text": part.said} for part in self.content]
        elif self.content is None and self.refusal is not None:
            values["content"] = self.refusal
        return values


class Function(ApiRequest):
    """A function that the model may call. parameters: a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(ApiRequest):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function
    _as_sent: Any = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(value)
        tool._as_sent = value
        return tool

    @property
    def for_template(self) -> Any:
        """What the request says of it, word for word: templates write it as JSON."""
        return self._as_sent


class NamedFunction(ApiRequest):
    """The name of a function."""

    name: str


class NamedTool(ApiRequest):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingRequest):
    """OpenAI's, with fields of vLLM's and the request parameters of the generator."""

    made_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("text_input", "input_ids", "input_lengths"), "messages")

    messages: Annotated[list[Message], bounded(1, _MOST_MESSAGES)]
    logprobs: bool | None = None
    max_completion_tokens: Annotated[Int32, Field(ge=1)] | None = None
    max_tokens: Annotated[Int32, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="none, auto, required, or an object that names a function"
    )
    tools: Annotated[list[Tool], bounded()] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # vLLM's.
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    thinking_token_budget: Annotated[Int32, Field(ge=0)] | None = None
    # They say who asks, or how the service is paid or cached, and change no answer.
    metadata: Annotated[dict[str, str], bounded()] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    # Not served.
    audio: Annotated[Any, not_served()] = None
    function_call: Annotated[Any, not_served("none")] = None
    functions: Annotated[Any, not_served([])] = None
    modalities: Annotated[Any, not_served(["text"])] = None
    moderation: Annotated[Any, not_served()] = None
    prediction: Annotated[Any, not_served()] = None
    store: Annotated[Any, not_served(False)] = None
    verbosity: Annotated[Any, not_served("medium")] = None
    web_search_options: Annotated[Any, not_served()] = None

    def chat(self) -> Conversation:
        """What all APIs make of a request. Raises as Conversation, and as `continues`."""
        choice = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return Conversation(
            [one.for_template() for one in self.messages],
            [tool.for_template for tool in self.tools or ()],
            choice or AUTO,
            self.parallel_tool_calls is not False,
            self.chat_template_kwargs or {},
            self.reasoning_effort,
            self.thinking_token_budget,
            add_generation_prompt=self.add_generation_prompt is not False,
            continues=continues(self.continue_final_message, self.add_generation_prompt),
        )

    def call(self, target: Target) -> GenerationCall:
        """The call of the model, without its prompt. Raises ApiError for contradictions."""
        sampling = self.sampling()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise invalid("max_tokens", self.max_tokens, "left out where max_completion_tokens is given")
        if (most := self.max_completion_tokens or self.max_tokens) is not None:
            sampling["max_tokens"] = most
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", self.top_logprobs, "left out unless logprobs is true")
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        if self.prompt_logprobs is not None:
            if self.stream:
                raise invalid("prompt_logprobs", self.prompt_logprobs, "left out where stream is true")
            sampling["prompt_logprobs"] = self.prompt_logprobs
        return GenerationCall(
            target=target,
            sampling=sampling,
            stream=bool(self.stream),
            logprobs=bool(self.logprobs),
            parameters=self.request_parameters(),
        )


def continues(continue_final_message: bool | None, add_generation_prompt: bool | None) -> bool:
    """Whether an answer goes on with the last message. Raises ApiError where it has to begin, too."""
    if continue_final_message and add_generation_prompt:
        raise invalid("continue_final_message", True, "false where add_generation_prompt is true")
    return bool(continue_final_message)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, context: Context) -> dict[str, Any] | AsyncGenerator[bytes, None]:
    """The next message of a conversation, whole or as server-sent events."""
    turn = await begin(context, body)
    completion = _ChatCompletion(body, turn)
    return completion.events(context) if body.stream else await completion.whole(context)


class _ChatCompletion:
    """The answer in OpenAI's shape, whole or as a stream of events."""

    def __init__(self, body: ChatRequest, turn: Turn) -> None:
        self._body = body
        self._turn = turn
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    async def whole(self, context: Context) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        choices = [self._choice(answer) for answer in await self._turn.answers(context)]
        scored = {} if self._body.prompt_logprobs is None else {"prompt_logprobs": self._turn.prompt_logprobs}
        usage = self._turn.usage.body()
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage, **scored}

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The events of a stream, without the last one."""
        head = {**self._head, "object": "chat.completion.chunk"}
        begun: set[int] = set()
        async for parts in self._turn.parts(context):
            for part in parts:
                delta, row = _delta(part.pieces), part.row
                if not delta and row.finish_reason is None and not row.logprobs:
                    # What has come may be the beginning of a mark.
                    continue
                if row.choice not in begun:
                    begun.add(row.choice)
                    delta = {"role": "assistant", **delta}
                logprobs = self._logprobs(row.logprobs or [])
                choice = {"index": row.choice, "delta": delta, "logprobs": logprobs, "finish_reason": row.finish_reason}
                usage = self._body.usage_of_piece(self._turn.usage)
                yield event({**head, "choices": [_with_reason(choice, row.stop_reason)], **usage})
        if self._body.includes_usage:
            yield event({**head, "choices": [], "usage": self._turn.usage.body()})

    def _choice(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            calls = [{"id": one.id, "type": "function", "function": _function(one, text)} for one, text in answer.calls]
            message |= {"content": answer.text or None, "tool_calls": calls}
        logprobs, reason = self._logprobs(answer.logprobs), answer.finish_reason
        choice = {"index": answer.choice, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return _with_reason(choice, answer.stop_reason)

    def _logprobs(self, tokens: Sequence[TokenEntries]) -> dict[str, Any] | None:
        return _logprobs(tokens, self._body.top_logprobs or 0) if self._body.logprobs else None


def _with_reason(choice: dict[str, Any], stop_reason: str | int | None) -> dict[str, Any]:
    return choice if stop_reason is None else {**choice, "stop_reason": stop_reason}


def _function(begun: CallBegun, arguments: str) -> dict[str, Any]:
    return {"name": begun.name, "arguments": arguments}


def _delta(pieces: Sequence[Piece]) -> dict[str, Any]:
    """What an event says. Of each call there is one object, the first one with its name."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, TextPiece | ReasoningPiece):
            name = "content" if isinstance(piece, TextPiece) else "reasoning_content"
            delta[name] = delta.get(name, "") + piece.text
        elif isinstance(piece, CallBegun):
            function = _function(piece, "")
            calls[piece.index] = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        elif isinstance(piece, ArgumentsPiece):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


def _logprobs(tokens: Sequence[TokenEntries], top: int) -> dict[str, Any]:
    """`logprobs` of one choice: an object for each token."""
    content = []
    for entries in tokens:
        token, *_ = entries.values()
        content.append({**_shown(token), "top_logprobs": [_shown(one) for one in likeliest(entries, top)]})
    return {"content": content, "refusal": None}


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": entry["decoded_token"], "logprob": entry["logprob"], "bytes": entry["bytes"]}
