"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.schemas.common import ApiRequest, Int32, JsonObject, bounded, not_served
from shapeshift.gateway.schemas.sampling import SamplingRequest

MAX_MESSAGES = 4096


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

    messages: Annotated[list[Message], bounded(1, MAX_MESSAGES)]
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

    def forced_function(self) -> Function | None:
        """The function that the answer has to call; None for an answer in text. Raises ApiError."""
        tools = self.tools or []
        if self.tool_choice == "required":
            if len(tools) != 1:
                text = f"tool_choice: required needs exactly one tool, got {len(tools)}; name the function instead"
                raise ApiError(400, text, param="tool_choice", code="unsupported_parameter")
            return tools[0].function
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            found = next((tool.function for tool in tools if tool.function.name == wanted), None)
            if found is None:
                text = f"tool_choice: {wanted!r} is not one of the tools"
                raise ApiError(400, text, param="tool_choice", code="invalid_value")
            return found
        return None
