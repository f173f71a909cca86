"""The next turn of a conversation: its prompt, the call of the model, and what its answers say."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shapeshift.gateway.answers.families import AnswerFormat, ToolFamily, format_of
from shapeshift.gateway.answers.pieces import (
    ArgumentsPiece,
    CallBegun,
    CallEnded,
    Piece,
    ReasoningPiece,
    TextPiece,
    new_call_id,
)
from shapeshift.gateway.answers.reader import AnswerReader
from shapeshift.gateway.answers.steps import Object
from shapeshift.gateway.catalogue import Front, Target
from shapeshift.gateway.conversation import AUTO, NONE, REQUIRED, Conversation
from shapeshift.gateway.endpoint import Context
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.generation import GenerationCall, Row, TokenEntries, Usage, rows
from shapeshift.gateway.tokens import tokens_of
from shapeshift.serving.description import GENERATION, TOOL_PARSERS

_PLAIN = AnswerFormat(None, None)
# What a grammar makes of a choice among several tools.
_ONE_OF_TOOLS = AnswerFormat(ToolFamily("", (), "", ((Object(),),), at_start=True), None)
# Of JSON schemas: what makes one of several, and where further ones stand.
_SEVERAL = frozenset(("anyOf", "oneOf", "$ref", "if", "dependentSchemas"))
_PARTS = frozenset(("items", "prefixItems", "anyOf", "oneOf"))
_NAMED_PARTS = frozenset(("properties", "$defs", "definitions"))
# What is no schema.
_DATA = frozenset(("const", "enum", "default", "examples"))
_FORMATS = functools.lru_cache(maxsize=64)(format_of)


@dataclass(frozen=True, slots=True)
class Part:
    """What is new of one choice: pieces, and the row that they come from, with OpenAI's word for its end."""

    row: Row
    pieces: Sequence[Piece]


@dataclass
class Answer:
    """One whole answer. calls: what begins each call, and its arguments."""

    choice: int
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[CallBegun, str]] = field(default_factory=list)
    logprobs: list[TokenEntries] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, part: Part) -> None:
        """Take what is new of it."""
        for piece in part.pieces:
            if isinstance(piece, TextPiece):
                self.text += piece.text
            elif isinstance(piece, ReasoningPiece):
                self.reasoning += piece.text
            elif isinstance(piece, CallBegun):
                self.calls.append((piece, ""))
            elif isinstance(piece, ArgumentsPiece):
                begun, arguments = self.calls[-1]
                self.calls[-1] = begun, arguments + piece.text
        self.logprobs += part.row.logprobs or []
        self.finish_reason, self.stop_reason = part.row.finish_reason, part.row.stop_reason


class Turn:
    """The next turn of a conversation, in all its choices. usage: the tokens so far."""

    def __init__(
        self, chat: Conversation, call: GenerationCall, form: AnswerFormat, streams: bool, thinks: bool = False
    ) -> None:
        self._chat = chat
        self._call = call
        self._form = form
        self._streams = streams
        self._thinks = thinks
        self._readers: dict[int, AnswerReader | _Arguments] = {}
        # With a budget there is one choice: its text, and its tokens.
        self._text, self._tokens, self._has_ended = "", 0, False
        self.usage = Usage(call.choices, reasoning=None if form.reasoning is None else 0)
        # With the first response, where they are asked for.
        self.prompt_logprobs: list[TokenEntries | None] | None = None

    @property
    def prompt(self) -> str:
        """The text that the model reads."""
        return str(self._call.prompts[0])

    async def input_tokens(self, context: Context) -> int:
        """How many tokens the model reads, found without an answer."""
        (tokens,) = await tokens_of(context, self._call.target, [self.prompt])
        return len(tokens.without_special().ids)

    async def answers(self, context: Context) -> list[Answer]:
        """The whole answers."""
        answers = [Answer(choice) for choice in range(self._call.choices)]
        async for parts in self.parts(context):
            for part in parts:
                answers[part.row.choice].add(part)
        return answers

    async def parts(self, context: Context) -> AsyncGenerator[list[Part], None]:
        """What each response of the model says. Raises as `generation.rows`."""
        call: GenerationCall | None = self._call
        while call is not None:
            async with contextlib.aclosing(rows(context, call)) as responses:
                async for response in responses:
                    yield [self._part(row) for row in response]
                    if self._is_over_budget():
                        break
            call = self._continued(call)

    def _part(self, row: Row) -> Part:
        reader = self._readers.get(row.choice)
        if reader is None:
            reader = self._readers[row.choice] = self._reader()
        thought = reader.is_reasoning
        pieces = reader.add(row.text)
        thought = thought or reader.is_reasoning
        reason = row.finish_reason
        if reason is not None:
            pieces = pieces + reader.end()
        if not self._chat.parallel:
            pieces = [piece for piece in pieces if getattr(piece, "index", 0) == 0]
        if reason == "stop" and reader.calls and self._chat.tool_choice in (AUTO, REQUIRED):
            # Of a tool that the request names, OpenAI says stop.
            reason = "tool_calls"
        self.usage.count(row)
        self.prompt_logprobs = self.prompt_logprobs or row.prompt_logprobs
        if self.usage.reasoning is not None:
            self.usage.reasoning += row.tokens * thought
        if self._chat.thinking_budget is not None:
            self._text += row.text
            self._tokens += row.tokens
            self._has_ended = reason is not None
        # `replace` takes as long as all the rest of it.
        return Part(row if reason == row.finish_reason else replace(row, finish_reason=reason), pieces)

    def _reader(self) -> AnswerReader | _Arguments:
        choice = self._chat.tool_choice
        if choice not in (AUTO, NONE, REQUIRED):
            return _Arguments(choice)
        if choice == REQUIRED and len(self._chat.schemas) == 1:
            return _Arguments(*self._chat.schemas)
        # What a grammar makes is a call, also where it is cut.
        streams = self._streams or choice == REQUIRED
        return AnswerReader(self._form, self._chat.schemas, thinks=self._thinks, streams=streams)

    def _is_over_budget(self) -> bool:
        budget, reader = self._chat.thinking_budget, self._readers.get(0)
        if budget is None or reader is None or self._has_ended:
            return False
        return reader.is_reasoning and (self.usage.reasoning or 0) >= budget

    def _continued(self, call: GenerationCall) -> GenerationCall | None:
        """The call that goes on behind reasoning that was cut; None where the answer is over."""
        left = call.sampling["max_tokens"] - self._tokens
        if not self._is_over_budget() or left < 1:
            return None
        assert self._form.reasoning is not None
        closing = self._form.reasoning.closing
        self._readers[0].add(closing)
        prompt, self._text, self._tokens = f"{call.prompts[0]}{self._text}{closing}", "", 0
        return replace(call, prompts=[prompt], sampling={**call.sampling, "max_tokens": left})


class _Arguments:
    """Reads an answer that a grammar makes the arguments of one tool, as `AnswerReader` does."""

    is_reasoning = False

    def __init__(self, name: str) -> None:
        self._begun: CallBegun | None = CallBegun(0, name, new_call_id())
        self.calls = 1

    def add(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [self._begun] if self._begun else []
        self._begun = None
        return [*pieces, ArgumentsPiece(0, text)] if text else pieces

    def end(self) -> list[Piece]:
        return [CallEnded(0)]


class TurnRequest(Protocol):
    """A request for the next turn of a conversation, whichever API it came by."""

    model: str

    def chat(self) -> Conversation:
        """The conversation so far."""

    def call(self, target: Target) -> GenerationCall:
        """What it says of the call of the model, without prompts."""


async def begin(context: Context, request: TurnRequest) -> Turn:
    """The next turn, by the model that the request names.

    Raises ApiError for tools that the model cannot be given, and for contradictions; else as `Catalogue.find`, the
    request's methods and `ChatRenderer.prompt`.
    """
    target = await context.gateway.catalogue.find(request.model, (GENERATION,))
    chat, call, front = request.chat(), request.call(target), target.front
    form = format_from(front)
    sampling = {"add_special_tokens": False, "max_tokens": front.number("max_tokens", 16), **call.sampling}
    if (grammar := _grammar(chat)) is not None:
        if "structured_outputs" in sampling:
            reason = "response_format: left out where tool_choice makes a call"
            raise ApiError(400, reason, param="response_format", code="invalid_value")
        sampling["structured_outputs"] = {"json": grammar}
    elif chat.schemas and form.tools is None:
        raise _no_parser(target)
    _check_budget(chat, call, form)
    prompt = await context.gateway.templates.prompt(target, chat)
    marks = form.reasoning
    thinks = marks is not None and (marks.opened_by(prompt) or marks.is_open_in(chat.begun))
    if chat.continues and form.messages is not None:
        # The prompt ends within a message, of which only the text is to come.
        form = _PLAIN
    if "structured_outputs" in sampling:
        prompt += form.before_grammar(thinks)
        form, thinks = _PLAIN if grammar is None or len(chat.schemas) == 1 else _ONE_OF_TOOLS, False
    elif form.reasoning is not None or chat.schemas:
        # Marks may be special tokens.
        sampling["skip_special_tokens"] = False
    # Each response says how many tokens it has: so those that are thought are known.
    streams = call.stream or form.reasoning is not None
    complete = replace(call, prompts=[prompt], sampling=sampling, stream=streams)
    return Turn(chat, complete, form, call.stream, thinks)


def format_from(front: Front) -> AnswerFormat:
    """How the model of a front writes its answers."""
    said = front.description
    templates: Iterable[Any] = (said.get("chat_template"), said.get("tool_use_template"))
    return _FORMATS(tuple(str(one) for one in templates if one), str(said.get("tool_parser") or ""))


def _grammar(chat: Conversation) -> Mapping[str, Any] | None:
    """The JSON schema of an answer that has to call a tool; None for any answer."""
    if chat.tool_choice in (AUTO, NONE):
        return None
    schemas: dict[str, Mapping[str, Any]] = {name: _closed(schema) for name, schema in chat.schemas.items()}
    if len(schemas) == 1:
        return next(iter(schemas.values()))
    names = "name", "arguments"
    options = []
    for place, (name, schema) in enumerate(schemas.items()):
        arguments = _moved(schema, f"#/anyOf/{place}/properties/arguments")
        properties = dict(zip(names, ({"const": name}, arguments), strict=True))
        option = {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}
        options.append(option)
    return {"anyOf": options}


def _moved(schema: Any, place: str) -> Any:
    """The schema as a part of another one, at `place`: where it refers to itself, such as by `#`, it does so still."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    # One with an address of its own is what its references begin at.
    if not isinstance(schema, Mapping) or "$id" in schema:
        return schema
    moved: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _NAMED_PARTS and isinstance(part, Mapping):
            # A property may have any name.
            moved[name] = {key: _moved(one, place) for key, one in part.items()}
        else:
            moved[name] = part if name in _DATA else _moved(part, place)
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/")):
        moved["$ref"] = place + pointer[1:]
    return moved


def _closed(schema: Any) -> Any:
    """The schema, without properties that it does not name: few say that there are no others, and models make some up.

    What consists of several schemas stays as it is: a property that one of them does not name another one may.
    """
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping) or "allOf" in schema or ("properties" in schema and _SEVERAL & schema.keys()):
        return schema
    closed = dict(schema)
    for name in _PARTS & schema.keys():
        closed[name] = _closed(schema[name])
    for name in _NAMED_PARTS & schema.keys():
        if isinstance(parts := schema[name], Mapping):
            closed[name] = {part: _closed(one) for part, one in parts.items()}
    return {"additionalProperties": False, **closed} if "properties" in closed else closed


def _no_parser(target: Target) -> ApiError:
    reason = (
        f"tools: the chat template of {target.name} shows no form of calls that the gateway reads: send tool_choice"
        f" none, required or a function, or state the model's tool_parser, one of {', '.join(TOOL_PARSERS)}"
    )
    return ApiError(400, reason, param="tools", code="model_not_supported")


def _check_budget(chat: Conversation, call: GenerationCall, form: AnswerFormat) -> None:
    if (budget := chat.thinking_budget) is None:
        return
    name = "thinking_token_budget"
    if form.reasoning is None:
        raise invalid(name, budget, f"left out: the chat template of {call.target.name} has no reasoning")
    if call.choices > 1:
        raise invalid(name, budget, "left out where n is above 1")
