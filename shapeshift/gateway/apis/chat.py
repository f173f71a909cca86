"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from shapeshift.gateway.apis.completions import Answer
from shapeshift.gateway.apis.fields import ApiRequest, Int32, JsonObject, bounded, not_served
from shapeshift.gateway.apis.sampling import SamplingRequest
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.conversation import Conversation
from shapeshift.gateway.endpoint import BodyRoute, Context
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.generation import GenerationCall, Row, TokenEntries, likeliest
from shapeshift.serving.description import GENERATION

router = APIRouter(route_class=BodyRoute, tags=["chat"])

_MOST_MESSAGES = 4096


class ContentPart(ApiRequest):
    """A part of a message: a text, or what an assistant said in place of one."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ContentPart:
        if self.said is None:
            raise PydanticCustomError("no_text", "a part of type text with its text, or refusal with its refusal")
        return self

    @property
    def said(self) -> str | None:
        """Its text."""
        return self.text if self.type == "text" else self.refusal


class FunctionCall(ApiRequest):
    """What an assistant's message calls."""

    name: str
    arguments: str


class ToolCall(ApiRequest):
    """One call of an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(ApiRequest):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], bounded()] | None = Field(
        None, description="a text, or a list of parts of type text"
    )
    name: str | None = None
    # What a model thought before its answer, by the names that servers give it.
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], bounded()] | None = None
    # What OpenAI's client writes out of an answer that has none.
    annotations: Annotated[Any, not_served([])] = None
    audio: Annotated[Any, not_served()] = None
    function_call: Annotated[Any, not_served()] = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise PydanticCustomError("no_content", "content: a text, or a list of parts of type text")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: what it has of role, content, calls and the like."""
        values = self.model_dump(exclude_none=True, exclude={"annotations"})
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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="none, auto, required, or an object that names a function"
    )
    tools: Annotated[list[Tool], bounded()] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # They say who asks, or how the service is paid or cached, and change no answer.
    metadata: Annotated[dict[str, str], bounded()] | None = None
    parallel_tool_calls: bool | None = None
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
    reasoning_effort: Annotated[Any, not_served("none")] = None
    store: Annotated[Any, not_served(False)] = None
    verbosity: Annotated[Any, not_served("medium")] = None
    web_search_options: Annotated[Any, not_served()] = None

    def conversation(self) -> Conversation:
        """Its messages and tools."""
        shown = self.tools if self.tools and self.tool_choice != "none" else []
        return Conversation(
            [one.for_template() for one in self.messages], [tool.for_template for tool in shown] or None
        )

    def forced_function(self) -> Function | None:
        """The function that the answer has to call; None for an answer in text. Raises ApiError."""
        tools = self.tools or []
        if self.tool_choice == "required":
            if len(tools) != 1:
                text = f"tool_choice: required needs exactly one tool, got {len(tools)}; name the function instead"
                raise ApiError(400, text, param="tool_choice", code="unsupported_parameter")
            return tools[0].function
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            function = next((tool.function for tool in tools if tool.function.name == name), None)
            if function is None:
                text = f"tool_choice: {name!r} is not one of the tools"
                raise ApiError(400, text, param="tool_choice", code="invalid_value")
            return function
        return None


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, context: Context) -> dict[str, Any] | AsyncGenerator[bytes, None]:
    """The next message of a conversation, whole or as server-sent events."""
    target = await context.gateway.catalogue.find(body.model, (GENERATION,))
    prompt = await context.gateway.templates.prompt(target, body.conversation())
    completion = _ChatCompletion(body, _call(target, body, prompt))
    return completion.events(context) if body.stream else await completion.whole(context)


def _call(target: Target, body: ChatRequest, prompt: str) -> GenerationCall:
    # What stands before a text is the template's own.
    sampling = {**body.sampling(), "add_special_tokens": False}
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens", body.max_tokens, "left out where max_completion_tokens is given")
    most = body.max_completion_tokens or body.max_tokens
    sampling["max_tokens"] = most if most is not None else target.front.number("max_tokens", 16)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", body.top_logprobs, "left out unless logprobs is true")
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    if (function := body.forced_function()) is not None:
        if "structured_outputs" in sampling:
            raise ApiError(400, "response_format: left out where tool_choice names a function", param="response_format")
        sampling["structured_outputs"] = {"json": function.parameters or {"type": "object"}}
    return GenerationCall(
        target=target,
        prompts=[prompt],
        sampling=sampling,
        stream=bool(body.stream),
        logprobs=bool(body.logprobs),
        echo=False,
        parameters=body.request_parameters(),
    )


class _ChatCompletion(Answer):
    def __init__(self, body: ChatRequest, call: GenerationCall) -> None:
        super().__init__(body, call, "chatcmpl", ("chat.completion", "chat.completion.chunk"))
        self._body = body
        self._function = body.forced_function()

    def choice(self, row: Row) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": row.text, "refusal": None}
        if self._function is not None:
            message |= {"content": None, "tool_calls": [self._tool_call(row, self._function)]}
        return {"message": message, **self._beside(row)}

    def delta(self, row: Row, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": row.text}
        if self._function is not None:
            call = self._tool_call(row, self._function) if first else {"function": {"arguments": row.text}}
            delta = {"tool_calls": [{"index": 0, **call}]}
        return {"delta": {"role": "assistant", **delta} if first else delta, **self._beside(row)}

    def _tool_call(self, row: Row, function: Function) -> dict[str, Any]:
        called = {"name": function.name, "arguments": row.text}
        return {"id": f"call_{self._id}_{row.choice}", "type": "function", "function": called}

    def _beside(self, row: Row) -> dict[str, Any]:
        reason = row.finish_reason
        if reason == "stop" and self._body.tool_choice == "required":
            # OpenAI's word; of a function that the request names it says stop.
            reason = "tool_calls"
        logprobs = _logprobs(row.logprobs or [], self._body.top_logprobs or 0) if self._body.logprobs else None
        return {"logprobs": logprobs, "finish_reason": reason}


def _logprobs(tokens: Sequence[TokenEntries], top: int) -> dict[str, Any]:
    """`logprobs` of one choice: an object for each token."""
    content = []
    for entries in tokens:
        token, *_ = entries.values()
        content.append({**_shown(token), "top_logprobs": [_shown(one) for one in likeliest(entries, top)]})
    return {"content": content, "refusal": None}


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": entry["decoded_token"], "logprob": entry["logprob"], "bytes": entry["bytes"]}
