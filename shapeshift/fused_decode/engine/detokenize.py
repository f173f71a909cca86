"""Tokens to text, one at a time: whole characters only, and no part of a stop string."""

from __future__ import annotations

import codecs
import contextlib
import functools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shapeshift.errors import UnsupportedError
from shapeshift.settings import require

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TOKENS_OF_A_TEXT = 64
_CHARACTERS_IN_PARTS = "Käse, 東京 und 🙂👩‍👧: naïve ½ नमस्ते"


def token_bytes(tokenizer_file: Path) -> list[bytes]:
    """The UTF-8 bytes that each token of a tokenizer.json adds to a text, by id; empty for special tokens.

    They are what the tokenizer's own decoder says of a token behind another one, for many decoders drop the space that
    a text begins with. Raises UnsupportedError for a token whose bytes cannot be told.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    first = _first_token(tokenizer)
    begun = tokenizer.decode(first)
    cut = len(begun)
    ids = range(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    texts = tokenizer.decode_batch([[*first, token] for token in ids])
    table = [text[cut:].encode() for text in texts]
    for token, text in enumerate(texts):
        if not text.startswith(begun):
            raise _unsupported(tokenizer, token, text)
        if "\ufffd" in text:
            table[token] = _bytes_of_part(tokenizer, token, text[cut:])
    return table


def with_special_tokens(table: Sequence[bytes], texts: Mapping[int, str]) -> list[bytes]:
    """The `token_bytes` of a tokenizer with the texts of its special tokens, by id, which are empty there."""
    whole = list(table)
    for token, text in texts.items():
        whole[token] = text.encode()
    return whole


def require_tokens_of_model(table: Sequence[bytes], vocab_size: int, extra_tokens: bool) -> None:
    """Check the `token_bytes` of a tokenizer against a model that embeds `vocab_size` tokens.

    extra_tokens: the setting; with it a prompt is refused where it has a token that the model lacks, and others are
    served. Raises InvalidInputError.
    """
    fits = extra_tokens or len(table) <= vocab_size
    allowed = (
        f"ids below {vocab_size}, the vocab_size of config.json: is it the tokenizer of another model? Download the "
    )
    remedy = f"{allowed}folder again, or set extra_tokens to true, to refuse only prompts with such tokens"
    require(fits, "tokenizer.json", f"id {len(table) - 1}", remedy)


def require_texts(tokenizer_file: Path, table: Sequence[bytes]) -> None:
    """Require that the `token_bytes` of a tokenizer.json make the text that its decoder makes, whatever follows what.

    Each token stands behind another one in a text of many tokens, and one stands twice. Raises UnsupportedError.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    first = _first_token(tokenizer)
    begun = tokenizer.decode(first)
    # Libraries differ in how many U+FFFD stand for parts of characters that make none.
    whole = [token for token, content in enumerate(table) if "\ufffd" not in content.decode(errors="replace")]
    random.Random(0).shuffle(whole)
    parts = (whole[at : at + _TOKENS_OF_A_TEXT] for at in range(0, len(whole), _TOKENS_OF_A_TEXT))
    texts = [part[:1] + part for part in parts]
    # A vocabulary of words without an unknown one has no ids for others.
    with contextlib.suppress(Exception):
        texts.append(tokenizer.encode(_CHARACTERS_IN_PARTS, add_special_tokens=False).ids)

    def made(tokens: Sequence[int]) -> str:
        return begun + b"".join(table[token] for token in tokens).decode(errors="replace")

    for tokens, text in zip(texts, tokenizer.decode_batch([first + tokens for tokens in texts]), strict=True):
        if text == made(tokens):
            continue
        for end, token in enumerate(tokens, 1):
            said, content, at = tokenizer.decode(first + tokens[:end]), made(tokens[:end]), len(made(tokens[: end - 1]))
            if said != content:
                raise UnsupportedError(
                    f"{tokenizer_file}: token {token} ({tokenizer.id_to_token(token)!r}) becomes {said[at:]!r} behind "
                    f"{content[:at][-20:]!r}, and {content[at:]!r} elsewhere: its decoder cannot decode token by "
                    "token; use a byte-level tokenizer"
                )


def _first_token(tokenizer: Any) -> list[int]:
    """A token that any other may follow: it begins no character and no space; none where there is no such token."""
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token])
        if text.strip() == text != "" and "\ufffd" not in text and not _BYTE_TOKEN.match(tokenizer.id_to_token(token)):
            return [token]
    return []


def _bytes_of_part(tokenizer: Any, token: int, text: str) -> bytes:
    """The bytes of a token whose text has U+FFFD: it ends within a character, or has that character itself."""
    name = tokenizer.id_to_token(token)
    byte, alphabet = _BYTE_TOKEN.fullmatch(name), _byte_level_alphabet()
    shown = bytes([int(byte[1], 16)]) if byte else b"".join(alphabet.get(letter, b"") for letter in name)
    for piece in (shown, text.encode()):
        if piece.decode(errors="replace") == text:
            return piece
    raise _unsupported(tokenizer, token, text)


def _unsupported(tokenizer: Any, token: int, text: str) -> UnsupportedError:
    name = tokenizer.id_to_token(token)
    return UnsupportedError(
        f"tokenizer.json: token {token} ({name!r}) becomes {text!r}: its decoder cannot decode token by token; use a "
        "byte-level tokenizer"
    )


@functools.cache
def _byte_level_alphabet() -> dict[str, bytes]:
    """The byte of each character of byte-level vocabularies (GPT-2); printable characters are their own bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    printable = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = zip(letters[len(printable) :], sorted({*range(256)} - {*printable.values()}), strict=True)
    return {letter: bytes([byte]) for letter, byte in (printable | dict(others)).items()}


class TextStream:
    """The text of one answer, released as soon as it is final.

    A character is held back until all its bytes have arrived, and the possible beginning of a stop string until the
    next text decides. Bytes that are not valid UTF-8 become U+FFFD. stopped: the stop string that ended it; None: none.
    """

    def __init__(self, table: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        self.stopped: str | None = None
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._stop = tuple(stop)
        self._held = ""

    def add(self, token: int) -> str:
        """The text that `token` releases; `stopped` is set with the token that completes a stop string."""
        # The vocabulary of a model may be larger than that of its tokenizer.
        text = self._decode(self._table[token] if token < len(self._table) else b"")
        return self._release(text) if self._stop and text else text

    def end(self) -> str:
        """The text that was held back; no further token follows."""
        rest = "" if self.stopped is not None else self._held + self._decode(b"", True)
        self._held = ""
        return rest

    def _release(self, text: str) -> str:
        text = self._held + text
        ends = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            at, self.stopped = min(ends)
            self._held = ""
            return text[:at]
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
