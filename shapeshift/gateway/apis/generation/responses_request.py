"""The body of /v1/responses, and the conversation that it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from shapeshift.gateway.apis.fields import (
    ITEMS,
    OF_TEXT,
    TEXT,
    ApiRequest,
    Int32,
    JsonObject,
    ModelRequest,
    OfClient,
    SaidPart,
    bounded,
    not_served,
    text_or_items,
)
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.conversation import AUTO, Conversation
from shapeshift.gateway.errors import invalid
from shapeshift.gateway.generation import GenerationCall

_MOST_ITEMS = 8192
# The fields that an item of a type needs.
_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class Part(SaidPart):
    """A part of an item."""

    type: Annotated[Literal["input_text", "output_text", "reasoning_text", "summary_text", "refusal"], OF_TEXT]
    annotations: Any = None
    logprobs: Any = None
    parsed: OfClient = None
    prompt_cache_breakpoint: Any = None


Parts = Annotated[list[Part], bounded()]
TextOrParts = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[Parts, Tag(ITEMS)],
    Discriminator(text_or_items, custom_error_type="form", custom_error_message="a text, or a list of parts"),
]


class Item(ApiRequest):
    """A message, a call, its result, or what the model thought. What the service says of it changes no answer."""

    # OpenAI's client dumps `async` under its own name.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: TextOrParts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: TextOrParts | None = None
    summary: Parts | None = None
    async_: Annotated[Any, not_served(False)] = Field(None, alias="async")
    caller: Any = None
    encrypted_content: str | None = None
    id: str | None = None
    namespace: Annotated[Any, not_served()] = None
    parsed_arguments: OfClient = None
    phase: str | None = None
    status: str | None = None

    @model_validator(mode="after")
    def _has_its_fields(self) -> Item:
        if (missing := next((name for name in _NEEDS[self.type] if getattr(self, name) is None), None)) is not None:
            raise PydanticCustomError("incomplete", "an item with its {field}", {"field": missing})
        return self


class FunctionTool(ApiRequest):
    """A function that the model may call. strict: accepted; a call that has to be made always follows the schema."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, not_served(["direct"])] = None
    async_: Annotated[Any, not_served(False)] = Field(None, alias="async")
    defer_loading: Annotated[Any, not_served(False)] = None
    output_schema: Annotated[Any, not_served()] = None

    def for_template(self) -> dict[str, Any]:
        """The tool in the form of the chat API, which templates read."""
        names = ("name", "description", "parameters", "strict")
        function = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"type": "function", "function": function}


class NamedFunction(ApiRequest):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class TextFormat(ApiRequest):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def structured_outputs(self) -> dict[str, Any] | None:
        """The same for the generator; None for any text. Raises ApiError for a schema that is missing."""
        if self.type == "json_schema" and self.schema_ is None:
            raise invalid("text.format.schema", None, "given where type is json_schema", "missing_parameter")
        return {"text": None, "json_object": {"json_object": True}, "json_schema": {"json": self.schema_}}[self.type]


class TextConfig(ApiRequest):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, not_served("medium")] = None


class Reasoning(ApiRequest):
    """How much the model thinks. summary: accepted; what it thinks comes word for word."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    context: Annotated[Any, not_served("auto")] = None
    generate_summary: Annotated[Any, not_served("auto")] = None
    mode: Annotated[Any, not_served("standard")] = None
    summary: Annotated[Any, not_served("auto")] = None


class StreamOptions(ApiRequest):
    """include_obfuscation: accepted and ignored, as nothing is padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(ModelRequest):
    """OpenAI's, without what is stored, with the request parameters of the generator."""

    made_of: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("text_input", "input_ids", "input_lengths", "messages"), "input"),
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "max_tokens": "max_output_tokens",
    }

    input: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[Annotated[list[Item], bounded(1, _MOST_ITEMS)], Tag(ITEMS)],
        Discriminator(text_or_items, custom_error_type="form", custom_error_message="a text, or a list of items"),
    ]
    instructions: str | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], bounded()] | None = None
    max_output_tokens: Annotated[Int32, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = Field(
        None, description="none, auto, required, or an object that names a function"
    )
    tools: Annotated[list[FunctionTool], bounded()] | None = None
    top_p: float | None = None
    # They say who asks, or how the service is paid or cached, and change no answer.
    metadata: Annotated[dict[str, str], bounded()] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    # Not served.
    access_programs: Annotated[Any, not_served()] = None
    background: Annotated[Any, not_served(False)] = None
    background_options: Annotated[Any, not_served()] = None
    context_management: Annotated[Any, not_served([])] = None
    conversation: Annotated[Any, not_served()] = None
    image: Annotated[Any, not_served()] = None
    max_tool_calls: Annotated[Any, not_served()] = None
    moderation: Annotated[Any, not_served()] = None
    previous_response_id: Annotated[Any, not_served()] = None
    prompt: Annotated[Any, not_served()] = None
    store: Annotated[Any, not_served(False)] = None
    top_logprobs: Annotated[Any, not_served(0)] = None
    truncation: Annotated[Any, not_served("disabled")] = None

    def field_of(self, name: str) -> str:
        """As of every request; a grammar is made of the format of the answer, or of the tools."""
        if name == "structured_outputs":
            return "text.format" if self.format is not None and self.format.type != "text" else "tools"
        return super().field_of(name)

    @property
    def format(self) -> TextFormat | None:
        """What the answer has to be; None: not said."""
        return self.text.format if self.text is not None else None

    @property
    def effort(self) -> str | None:
        """How much the model thinks; None: not said."""
        return self.reasoning.effort if self.reasoning is not None else None

    def chat(self) -> Conversation:
        """What all APIs make of a request. Raises as Conversation."""
        text = {"role": "user", "content": self.input}
        said = [text] if isinstance(self.input, str) else _messages(self.input)
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice = self.tool_choice
        return Conversation(
            [*first, *said],
            [tool.for_template() for tool in self.tools or ()],
            (choice.name if isinstance(choice, NamedFunction) else choice) or AUTO,
            self.parallel_tool_calls is not False,
            reasoning_effort=self.effort,
        )

    def call(self, target: Target) -> GenerationCall:
        """The call of the model, without its prompt. Raises ApiError for contradictions."""
        values = {"max_tokens": self.max_output_tokens, "temperature": self.temperature, "top_p": self.top_p}
        sampling: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if self.format is not None and (outputs := self.format.structured_outputs()):
            sampling["structured_outputs"] = outputs
        return GenerationCall(
            target=target,
            sampling=sampling,
            stream=bool(self.stream),
            parameters=self.request_parameters(),
        )


def _messages(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """The messages as chat templates know them: what the model thought, said and called in turn is one."""
    said: dict[str, Any] = {}
    for item in items:
        is_said = item.type in ("reasoning", "function_call") or item.role == "assistant"
        # It thinks before it answers, and answers before it calls.
        begins = item.type == "reasoning" or (item.type == "message" and not {"content", "tool_calls"}.isdisjoint(said))
        if said and (begins or not is_said):
            yield _assistant(said)
            said = {}
        if item.type == "reasoning":
            said["reasoning_content"] = _text(item.content or item.summary or [])
        elif item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            said.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif item.type == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output or "")}
        elif is_said:
            said["content"] = _text(item.content or "")
        else:
            yield {"role": item.role, "content": _text(item.content or "")}
    if said:
        yield _assistant(said)


def _assistant(said: Mapping[str, Any]) -> dict[str, Any]:
    content = {} if said.keys() & {"content", "tool_calls"} else {"content": ""}
    return {"role": "assistant", **content, **said}


def _text(content: str | Sequence[Part]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [{"type": "text", "text": part.said or ""} for part in content]
    return parts if len(parts) > 1 else "".join(part["text"] for part in parts)
