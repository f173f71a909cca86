"""Tokens to text, one at a time: whole characters only, and no part of a stop string."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shapeshift.errors import UnsupportedError
from shapeshift.settings import require

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoding steps that change only the beginning or end of a text, or join the output of earlier steps.
_WITHOUT_EFFECT = ("Fuse", "Strip")


def token_bytes(tokenizer_file: Path) -> list[bytes]:
    """The UTF-8 bytes that each token of a tokenizer.json adds to a text, by id; empty for special tokens.

    Raises UnsupportedError for a decoder under which a token's text depends on its neighbours.
    """
    made = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    steps = _steps(made["decoder"])
    vocabulary = {int(number): str(token) for token, number in made["model"]["vocab"].items()}
    table = {number: _bytes(token, steps) for number, token in vocabulary.items()}
    for added in made.get("added_tokens", ()):
        table[added["id"]] = b"" if added["special"] else added["content"].encode()
    return [table.get(number, b"") for number in range(max(table, default=-1) + 1)]


def require_tokens_of_model(table: Sequence[bytes], vocab_size: int, extra_tokens: bool) -> None:
    """Check the `token_bytes` of a tokenizer against a model that embeds `vocab_size` tokens.

    extra_tokens: the setting; with it a prompt is refused where it has a token that the model lacks, and others are
    served. Raises InvalidInputError.
    """
    known = extra_tokens or len(table) <= vocab_size
    allowed = (
        f"ids below {vocab_size}, the vocab_size of config.json: is it the tokenizer of another model? Download the "
    )
    remedy = f"{allowed}folder again, or set extra_tokens to true, to refuse only prompts with such tokens"
    require(known, "tokenizer.json", f"id {len(table) - 1}", remedy)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's steps that change the text of a token, in order."""
    found = [decoder] if decoder is None or decoder["type"] != "Sequence" else decoder["decoders"]
    for step in found:
        kind = None if step is None else step["type"]
        literal = kind == "Replace" and "String" in step["pattern"]
        if not literal and kind not in ("ByteLevel", "ByteFallback", "Metaspace", *_WITHOUT_EFFECT):
            raise UnsupportedError(
                f"tokenizer.json: decoder {kind} cannot decode token by token; use a byte-level tokenizer"
            )
    return [step for step in found if step["type"] not in _WITHOUT_EFFECT]


def _bytes(token: str, steps: Iterable[dict[str, Any]]) -> bytes:
    for step in steps:
        if step["type"] == "ByteLevel":
            return b"".join(_BYTE_OF.get(character) or character.encode() for character in token)
        if step["type"] == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
        if step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
    return token.encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """The byte of each character of byte-level vocabularies (GPT-2); printable characters are their own bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return {character: bytes([byte]) for byte, character in shown.items()}


_BYTE_OF = _byte_level_alphabet()


class TextStream:
    """The text of one answer, released as soon as it is final.

    A character is held back until all its bytes have arrived, and the possible beginning of a stop string until the
    next text decides. Bytes that are not valid UTF-8 become U+FFFD.
    """

    def __init__(self, table: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._stop = tuple(stop)
        self._held = ""

    def add(self, token: int) -> str:
        """The text that `token` releases; `stopped` becomes true with the token that completes a stop string."""
        # The vocabulary of a model may be larger than that of its tokenizer.
        text = self._decode(self._table[token] if token < len(self._table) else b"")
        return self._release(text) if self._stop and text else text

    def end(self) -> str:
        """The text that was held back; no further token follows."""
        rest = "" if self.stopped else self._held + self._decode(b"", True)
        self._held = ""
        return rest

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def text_of(table: Sequence[bytes], tokens: Iterable[int]) -> str:
    """The text of all these tokens."""
    stream = TextStream(table)
    return "".join(map(stream.add, tokens)) + stream.end()


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
