"""The text of an answer while it comes, and generators that read it: each `yield` waits for more text."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

import orjson

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACE = re.compile(r"\s*")
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_LONGEST_NAME = 512


class Source:
    """Text as far as it has come. at: the place up to which it has been read; a reader may set it back."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False

    def add(self, text: str) -> None:
        """Append what has come."""
        self.text += text

    def drop_read(self) -> None:
        """Forget what has been read; places before are void."""
        self.text = self.text[self.at :]
        self.at = 0


def skip(source: Source, pattern: re.Pattern[str] = _SPACE) -> Reading[bool]:
    """Go on to the first character that a `pattern` of one repeated class does not match; False: the answer is over."""
    while True:
        match = pattern.match(source.text, source.at)
        source.at = match.end() if match else source.at
        if source.at < len(source.text):
            return True
        if source.is_over:
            return False
        yield


def literal(source: Source, text: str) -> Reading[bool]:
    """Whether `text` is next, behind any white space; if so it is read."""
    yield from skip(source)
    while True:
        part = source.text[source.at : source.at + len(text)]
        if part == text:
            source.at += len(text)
            return True
        if source.is_over or not text.startswith(part):
            return False
        yield


def until(source: Source, end: str, most: int = _LONGEST_NAME) -> Reading[str | None]:
    """The text before `end`, which is read too; None where it is longer than `most`, or the answer is over."""
    start, scanned = source.at, source.at
    while (at := source.text.find(end, scanned)) < 0:
        if source.is_over or len(source.text) - start > most + len(end):
            return None
        scanned = max(start, len(source.text) - len(end) + 1)
        yield
    source.at = at + len(end)
    return source.text[start:at]


def json_string(source: Source) -> Reading[str | None]:
    """A string of JSON, behind any white space; None for anything else."""
    if not (yield from skip(source)) or source.text[source.at] != '"':
        return None
    start, scanned = source.at, source.at + 1
    while (match := _INSIDE.search(source.text, scanned)) is None or match[0] == "\\":
        if match is not None:
            # The next character is part of the escape, also where it has not come yet.
            scanned = match.end() + 1
            continue
        scanned = max(scanned, len(source.text))
        if source.is_over:
            return None
        yield
    source.at = match.end()
    try:
        return str(orjson.loads(source.text[start : source.at]))
    except orjson.JSONDecodeError:
        return None


def json_object(source: Source, put: Callable[[str], None]) -> Reading[bool]:
    """Pass on the text of an object of JSON, piece by piece, behind any white space. False for anything else.

    Only strings and brackets are looked at. A string is passed on as what it holds: some models write objects so.
    """
    if not (yield from skip(source)):
        return False
    if source.text[source.at] == '"':
        inner = yield from json_string(source)
        put(inner or "")
        return inner is not None
    if source.text[source.at] != "{":
        return False
    depth, is_inside, scanned = 0, False, source.at
    while True:
        match = (_INSIDE if is_inside else _OUTSIDE).search(source.text, scanned)
        if match is None:
            scanned = max(scanned, len(source.text))
            put(source.text[source.at :])
            source.at = len(source.text)
            if source.is_over:
                return False
            yield
            continue
        scanned = match.end()
        if match[0] == "\\":
            # The next character is part of the escape, also where it has not come yet.
            scanned += 1
        elif match[0] == '"':
            is_inside = not is_inside
        else:
            depth += 1 if match[0] in "{[" else -1
            if depth == 0:
                put(source.text[source.at : scanned])
                source.at = scanned
                return True
