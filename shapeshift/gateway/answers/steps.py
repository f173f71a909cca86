"""The steps by which one call is read: literal texts between a name and its arguments, in the forms that models write.

Each step reads on from the place of the source, and says whether it found what it looks for.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from shapeshift.gateway.answers.pieces import ArgumentsPiece, CallBegun, CallEnded, Piece, new_call_id
from shapeshift.gateway.answers.source import Reading, Source, json_object, json_string, literal, skip, until
from shapeshift.gateway.answers.values import elements, types_of_each, value

_NAME_KEYS = frozenset(("name", "tool_name"))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_ID_KEYS = frozenset(("id", "tool_call_id"))
_LONGEST_VALUE = 1 << 22
_LITERALS = {"None": "null", "True": "true", "False": "false"}


class Calls:
    """The calls of one answer.

    tools    the JSON schema of the parameters of each tool, by its name
    emit     gets the pieces
    streams  whether a call's pieces go out as they come; else once its arguments are a JSON object
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], emit: Callable[[Piece], None], streams: bool) -> None:
        self.tools = tools
        self.emit = emit
        self.streams = streams
        self.count = 0


class Call:
    """One call while it is read."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._parts: list[str] = []
        self._index = 0
        self.name = ""
        self.id = ""
        self.is_begun = False

    def called(self, name: str) -> bool:
        """Take the name; False: no tool has it."""
        self.name = name
        return name in self._calls.tools

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of the tool's parameters."""
        return self._calls.tools[self.name]

    def put(self, text: str) -> None:
        """Take a piece of the arguments, after the name."""
        self._parts.append(text)
        if self._calls.streams and text:
            self._begin()
            self._calls.emit(ArgumentsPiece(self._index, text))

    def close(self) -> bool:
        """Whether this is a call: it has a name, and its arguments are a JSON object or, in a stream, have gone out."""
        if not self.is_begun:
            arguments = "".join(self._parts) or "{}"
            if self.name not in self._calls.tools or not _is_object(arguments):
                return False
            self._begin()
            self._calls.emit(ArgumentsPiece(self._index, arguments))
        self._calls.emit(CallEnded(self._index))
        return True

    def another(self) -> Call:
        """A further call of the same answer."""
        return Call(self._calls)

    def _begin(self) -> None:
        if not self.is_begun:
            self.is_begun = True
            self._index = self._calls.count
            self._calls.count += 1
            self._calls.emit(CallBegun(self._index, self.name, self.id or new_call_id()))


class Step(Protocol):
    """What stands at one place of a call."""

    def read(self, source: Source, call: Call) -> Reading[bool]:
        """Read it into the call."""


def read_call(steps: Sequence[str | Step], source: Source, call: Call) -> Reading[bool]:
    """Whether a call that has these steps is next."""
    for step in steps:
        reading = literal(source, step) if isinstance(step, str) else step.read(source, call)
        if not (yield from reading):
            return call.is_begun and call.close()
    return call.close()


@dataclass(frozen=True)
class Head:
    """The text before `end`: `pattern` has a group `name`, and may have a group `id`.

    keeps_end: whether `end` belongs to what follows.
    """

    end: str
    pattern: re.Pattern[str] = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*")
    keeps_end: bool = False

    def read(self, source: Source, call: Call) -> Reading[bool]:
        text = yield from until(source, self.end)
        match = None if text is None else self.pattern.fullmatch(text)
        if match is None:
            return False
        source.at -= len(self.end) * self.keeps_end
        call.id = match.groupdict().get("id") or ""
        return call.called(match["name"])


class Arguments:
    """The arguments as an object of JSON."""

    def read(self, source: Source, call: Call) -> Reading[bool]:
        return (yield from json_object(source, call.put))


@dataclass(frozen=True)
class Object:
    """An object of JSON with the name and the arguments, in any order, or with such an object as its `function`.

    is_inner: whether it is that one.
    """

    is_inner: bool = False

    def read(self, source: Source, call: Call) -> Reading[bool]:
        if not (yield from literal(source, "{")):
            return False
        early: list[str] = []
        while True:
            key = yield from json_string(source)
            if key is None or not (yield from literal(source, ":")):
                return False
            if key in _ARGUMENT_KEYS:
                is_read = yield from json_object(source, call.put if call.name else early.append)
            elif key == "function" and not self.is_inner and (yield from _is_next(source, "{")):
                is_read = yield from Object(is_inner=True).read(source, call)
            else:
                is_read = yield from self._read_text(key, source, call)
                if key in _NAME_KEYS and early:
                    call.put("".join(early))
            if not is_read:
                return False
            if not (yield from literal(source, ",")):
                return (yield from literal(source, "}"))

    def _read_text(self, key: str, source: Source, call: Call) -> Reading[bool]:
        value = yield from json_string(source)
        if value is None:
            return False
        if key in _NAME_KEYS:
            return call.called(value)
        if key in _ID_KEYS:
            call.id = value
        return key in _ID_KEYS or key == "type" or (key == "function" and call.called(value))


@dataclass(frozen=True)
class Parameters:
    """Arguments one by one, between tags: `begin`, the name, `name_end`, anything, `value`, the value, `end`.

    has_lines: whether a value that is text stands on lines of its own. around: what may stand around a value.
    """

    begin: str
    name_end: str
    value: str
    end: str
    has_lines: bool = False
    around: tuple[str, str] = ("", "")

    def read(self, source: Source, call: Call) -> Reading[bool]:
        types = types_of_each(call.schema)
        call.put("{")
        comma = ""
        while True:
            mark = source.at
            if not (yield from literal(source, self.begin)):
                break
            name = yield from until(source, self.name_end)
            between = yield from until(source, self.value)
            text = yield from until(source, self.end, _LONGEST_VALUE)
            if name is None or between is None or text is None:
                return False
            if self.has_lines:
                text = text.removeprefix("\n").removesuffix("\n")
            before, after = self.around
            if text.startswith(before) and text.endswith(after):
                text = text.removeprefix(before).removesuffix(after)
            call.put(f"{comma}{json.dumps(name)}: {value(text, types.get(name, ('string',)))}")
            comma = ", "
        source.at = mark
        call.put("}")
        return True


@dataclass(frozen=True)
class Elements:
    """Arguments as elements, `mark` before each tag, before the end of the element `last`.

    They are read as `values.elements` says.
    """

    mark: str
    last: str

    def read(self, source: Source, call: Call) -> Reading[bool]:
        text = yield from until(source, f"{self.mark}</{self.last}>", _LONGEST_VALUE)
        arguments = None if text is None else elements(text, self.mark, call.schema)
        if arguments is None:
            return False
        call.put(arguments)
        return True


@dataclass(frozen=True)
class Braces:
    """Gemma's arguments: an object without quotes around names, with `quote` around texts. It stands before `end`."""

    quote: str
    end: str

    def read(self, source: Source, call: Call) -> Reading[bool]:
        text = yield from until(source, self.end, _LONGEST_VALUE)
        if text is None:
            return False
        quote = re.escape(self.quote)
        # A name is looked for at its first character alone: else the time grows with the square of the length.
        other = r"[^\s{}\[\]:,\"]"
        pattern = rf"{quote}(?P<text>.*?){quote}|(?<!{other})(?P<name>{other}+)\s*:|\b(?P<word>None|True|False)\b"
        arguments = re.sub(pattern, _as_json, text.strip(), flags=re.DOTALL)
        if not _is_object(arguments):
            return False
        call.put(arguments)
        return True


@dataclass(frozen=True)
class Python:
    """Calls as Python writes them: `f(a=1)`, or a list of them. They stand before `end`, or end the answer."""

    end: str = ""

    def read(self, source: Source, call: Call) -> Reading[bool]:
        if self.end:
            text = yield from until(source, self.end, _LONGEST_VALUE)
        else:
            while not source.is_over:
                yield
            text, source.at = source.text[source.at :], len(source.text)
        calls = _python_calls(text or "")
        if not calls or not all(call.called(name) for name, _ in calls):
            return False
        *others, last = calls
        for name, arguments in others:
            other = call.another()
            other.called(name)
            other.put(arguments)
            other.close()
        call.called(last[0])
        call.put(last[1])
        return True


def _is_next(source: Source, text: str) -> Reading[bool]:
    yield from skip(source)
    return source.text.startswith(text, source.at)


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _as_json(match: re.Match[str]) -> str:
    if match["name"] is not None:
        return json.dumps(match["name"], ensure_ascii=False) + ":"
    return _LITERALS[match["word"]] if match["word"] else json.dumps(match["text"], ensure_ascii=False)


def _python_calls(text: str) -> list[tuple[str, str]]:
    """The name and the arguments of each call; none for anything else."""
    try:
        listed = text.strip().removeprefix("[").removesuffix("]")
        tree = ast.parse(f"[{listed}]", mode="eval").body
        return [_python_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    name = ast.unparse(node.func).removesuffix(".call")
    values = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    return name, orjson.dumps(values).decode()
