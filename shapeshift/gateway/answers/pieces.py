"""An answer in the form that all APIs share: pieces of text, of reasoning and of calls, as they come."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

# Templates of Mistral's refuse ids of another form; no other cares.
_ID_CHARACTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What the answer says next."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """What the model thinks next, before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins. index: its number among the calls of the answer; id: unlike that of any other call."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """How the arguments of the call go on: JSON of an object, piece by piece."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The arguments of the call are complete."""

    index: int


Piece = TextPiece | ReasoningPiece | CallBegun | ArgumentsPiece | CallEnded


def new_call_id() -> str:
    """An id for a call to which the model gave none."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
