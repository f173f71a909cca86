"""Reads the text of an answer: what is said, what is thought, and which tools are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shapeshift.gateway.answers.families import MESSAGE, AnswerFormat, Messages, ReasoningMarks, Steps, ToolFamily
from shapeshift.gateway.answers.pieces import Piece, ReasoningPiece, TextPiece
from shapeshift.gateway.answers.source import Reading, Source, literal, skip, until
from shapeshift.gateway.answers.steps import Call, Calls, read_call

# Marks without a call, after which all is text: each is read up to where its call could end.
_MOST_VAIN = 16
# White space that is held back until it is known whether a mark follows.
_MOST_SPACE = 256
_BEFORE, _BETWEEN, _IN_LIST = re.compile(r"[\s\[]*"), re.compile(r"[\s,;]*"), re.compile(r"[\s,;\]]*")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


class AnswerReader:
    """Reads one answer, piece by piece.

    form      how its model writes
    tools     the JSON schema of the parameters of each tool that may be called, by name
    thinks    whether the answer starts within reasoning, which its prompt has opened
    streams   whether the arguments of a call go out as they come: if they are broken then, they stay its arguments.
              Otherwise a call goes out once it is complete, and what only looks like one is text.

    White space next to a mark is part of the mark. Everything else is in the pieces, once.
    """

    def __init__(
        self, form: AnswerFormat, tools: Mapping[str, Mapping[str, Any]], *, thinks: bool, streams: bool
    ) -> None:
        self.is_reasoning = False
        self._form = form
        family = form.tools
        is_bare = family is None or not (tools or family.messages or family.said)
        self._is_plain = form.reasoning is None and is_bare
        self._source = Source()
        self._pieces: list[Piece] = []
        self._calls = Calls(tools, self._pieces.append, streams)
        self._reading = self._answer(thinks)
        if family is not None and family.messages is not None:
            self._reading = self._messages(family, family.messages)
        self._is_done = False
        self._advance()

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._calls.count

    def add(self, text: str) -> list[Piece]:
        """What the next text of the answer says."""
        if self._is_plain:
            return [TextPiece(text)] if text else []
        self._source.add(text)
        return self._advance()

    def end(self) -> list[Piece]:
        """What is left when the answer is over."""
        self._source.is_over = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        if not self._is_done:
            self._is_done = next(self._reading, True) is True
        pieces = _joined(self._pieces)
        self._pieces.clear()
        return pieces

    def _answer(self, thinks: bool) -> Reading[None]:
        marks, family = self._form.reasoning, self._form.tools
        if marks is not None:
            yield from self._thoughts(marks, thinks)
        if family is None:
            yield from self._pass_on((), TextPiece)
            return
        calls = family.calls if self._calls.tools else ()
        if not (yield from self._says(family)) and family.at_start and calls:
            yield from self._section(family, calls[:1])
        begins, vain = bool(family.begin and (calls or family.said)), 0
        while True:
            begin = (family.begin,) if begins and vain < _MOST_VAIN else ()
            mark = yield from self._pass_on((*begin, *family.dropped), TextPiece)
            if mark is None:
                return
            if mark.lstrip() in family.dropped or (yield from self._says(family)):
                continue
            if not (yield from self._section(family, calls)):
                self._pieces.append(TextPiece(mark))
                vain += 1

    def _says(self, family: ToolFamily) -> Reading[bool]:
        """Whether `said` of the family is next, which is read."""
        start = self._source.at
        if family.said and (yield from literal(self._source, family.said)):
            return True
        self._source.at = start
        return False

    def _thoughts(self, marks: ReasoningMarks, thinks: bool) -> Reading[None]:
        start = self._source.at
        if not thinks and not (yield from literal(self._source, marks.begin)):
            self._source.at = start
            # Some say so that they do not think.
            if not (yield from literal(self._source, marks.end)):
                self._source.at = start
            return
        self.is_reasoning = True
        yield from skip(self._source)
        yield from self._pass_on((marks.end,), ReasoningPiece)
        self.is_reasoning = False
        yield from skip(self._source)

    def _section(self, family: ToolFamily, kinds: Sequence[Steps]) -> Reading[bool]:
        """Read calls of these kinds. False, and nothing is read, where there is none."""
        source, start, count = self._source, self._source.at, self.calls
        yield from skip(source, _BEFORE)
        is_list = "[" in source.text[start : source.at]
        end = start
        while (yield from self._call(kinds)):
            end = source.at
            yield from skip(source, _IN_LIST if is_list else _BETWEEN)
            if is_list:
                end = source.text.rfind("]", end, source.at) + 1 or end
            if family.end and (yield from literal(source, family.end)):
                end = source.at
                break
        source.at = end
        if self.calls == count:
            return False
        yield from skip(source)
        return True

    def _call(self, kinds: Sequence[Steps]) -> Reading[bool]:
        start = self._source.at
        for steps in kinds:
            if (yield from read_call(steps, self._source, Call(self._calls))):
                return True
            self._source.at = start
        return False

    def _messages(self, family: ToolFamily, marks: Messages) -> Reading[None]:
        """Read an answer that is messages."""
        source = self._source
        while True:
            start = source.at
            header = yield from until(source, MESSAGE)
            if header is None:
                source.at = start
                yield from self._pass_on((), TextPiece)
                return
            recipient = _RECIPIENT.search(header)
            tool = "" if recipient is None or recipient[1] in marks.others else recipient[1]
            if tool and (yield from self._called(family, tool)):
                yield from self._pass_on(marks.ends, TextPiece)
                continue
            if tool:
                self._pieces.append(TextPiece(header + MESSAGE))
            self.is_reasoning = marks.thought in header
            yield from self._pass_on(marks.ends, ReasoningPiece if self.is_reasoning else TextPiece)
            self.is_reasoning = False

    def _called(self, family: ToolFamily, name: str) -> Reading[bool]:
        """Whether the text of a message is a call, which is read; of this tool where the text names none."""
        start, call = self._source.at, Call(self._calls)
        if family.begin:
            if (yield from literal(self._source, family.begin)) and (yield from self._section(family, family.calls)):
                return True
        elif call.called(name) and (yield from read_call(family.calls[0], self._source, call)):
            return True
        self._source.at = start
        return False

    def _pass_on(self, ends: Sequence[str], piece: Callable[[str], Piece]) -> Reading[str | None]:
        """Pass on the text before one of `ends`, which is read too; None: the answer is over.

        The result is that end with the white space before it, which is not passed on.
        """
        source = self._source
        pattern = re.compile("|".join(map(re.escape, ends)))
        while True:
            text = source.text[source.at :]
            match = pattern.search(text) if ends else None
            stop = len(text)
            if match is not None:
                stop = len(text[: match.start()].rstrip())
            elif ends and not source.is_over:
                whole = len(text) - max(_overlap(text, end) for end in ends)
                stop = max(len(text[:whole].rstrip()), whole - _MOST_SPACE)
            if stop:
                self._pieces.append(piece(text[:stop]))
            source.at += stop if match is None else match.end()
            source.drop_read()
            if match is not None:
                return text[stop : match.end()]
            if source.is_over:
                return None
            yield


def _overlap(text: str, end: str) -> int:
    """The length of the longest end of `text` with which `end` begins."""
    at = text.find(end[0], max(0, len(text) - len(end) + 1))
    while at >= 0 and not end.startswith(text[at:]):
        at = text.find(end[0], at + 1)
    return len(text) - at if at >= 0 else 0


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with texts that follow one another in one piece."""
    if len(pieces) < 2:
        return list(pieces)
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece | ReasoningPiece) and type(last) is type(piece):
            assert isinstance(last, TextPiece | ReasoningPiece)
            joined[-1] = type(piece)(last.text + piece.text)
        else:
            joined.append(piece)
    return joined
