"""Text to vocabulary ids, with the checkpoint's own tokenizer.json."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shapeshift.engines.protocol import Array, Ids
from shapeshift.errors import InvalidInputError

FILE_NAME = "tokenizer.json"
_BYTES_PER_TOKEN = 128


class Encoded(NamedTuple):
    """One text, or a pair: its ids, INT64 [length], and where each token stands, INT32 [length, 2].

    Positions are of bytes in the UTF-8 text, from its first to behind its last; -1 for special tokens. Those of a
    pair's second text count in that text.
    """

    ids: Ids
    offsets: Array


class TextTokenizer:
    """Encodes texts of 1 to `max_tokens` tokens, special ones counted. Safe to share between threads.

    field: the input that errors name; remedy: what they offer to who sends too long a text; type_stride: added to the
    ids of a pair's second text (`manifest.Manifest.type_stride`).
    """

    def __init__(
        self,
        file: Path,
        max_tokens: int,
        field: str = "TEXT",
        remedy: str = " (or truncate=true)",
        type_stride: int = 0,
    ) -> None:
        from tokenizers import Tokenizer

        self.max_tokens = max_tokens
        self._field = field
        self._remedy = remedy
        self._type_stride = type_stride
        # A text longer than this is not worth the time to find out how many tokens it has.
        self.max_bytes = max_tokens * _BYTES_PER_TOKEN
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._special = self._tokenizer.num_special_tokens_to_add(False)

    @property
    def vocabulary(self) -> int:
        """The number of ids, special tokens counted."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: bytes, row: int | None = None, truncate: bool = False) -> Ids:
        """The ids of one UTF-8 text, INT64 [length].

        Raises InvalidInputError naming field and `row` for an empty text, invalid UTF-8, or one that is too long
        (unless `truncate`, which keeps the first tokens and the closing special token).
        """
        decoded = self._decoded(text, self._field, row, truncate)
        ids = self._tokenizer.encode(decoded).ids
        if not ids:
            raise InvalidInputError(self._field, decoded, "at least one token", row)
        if len(ids) > self.max_tokens:
            self._refuse_length(len(ids), row, truncate)
            closing = ids[-1:] if self._special > 1 else []
            ids = ids[: self.max_tokens - len(closing)] + closing
        return np.asarray(ids, dtype=np.int64)

    def encode_whole(
        self, text: bytes, pair: bytes | None = None, row: int | None = None, truncate: bool = False
    ) -> Encoded:
        """One text, or a pair of texts, with where each token stands. Raises as `encode`, naming the text.

        Truncation takes tokens from the longer text of a pair.
        """
        first = self._decoded(text, self._field, row, truncate)
        second = None if pair is None else self._decoded(pair, f"{self._field}_PAIR", row, truncate)
        found = self._tokenizer.encode(first, second)
        if not found.ids:
            raise InvalidInputError(self._field, first, "at least one token", row)
        if len(found.ids) > self.max_tokens:
            self._refuse_length(len(found.ids), row, truncate)
            found = self._cut(first, second)
        ids = np.asarray(found.ids, dtype=np.int64)
        if self._type_stride:
            ids += np.asarray(found.type_ids, dtype=np.int64) * self._type_stride
        return Encoded(ids, _byte_offsets(found, first, second))

    def _cut(self, first: str, second: str | None) -> Any:
        """The texts' first tokens, as many as fit, between the special ones."""
        parts = [self._tokenizer.encode(text, add_special_tokens=False) for text in (first, second) if text is not None]
        room = self.max_tokens - self._tokenizer.num_special_tokens_to_add(second is not None)
        shorter = min(len(part.ids) for part in parts) if len(parts) > 1 else 0
        for part in parts:
            # The shorter text keeps what it needs, up to half of the room (the first one half rounded up).
            own = room if len(parts) == 1 else max(room - shorter, -(-room // 2) if part is parts[0] else room // 2)
            part.truncate(min(len(part.ids), own))
        return self._tokenizer.post_process(parts[0], parts[1] if len(parts) > 1 else None)

    def _decoded(self, text: bytes, field: str, row: int | None, truncate: bool) -> str:
        if not text:
            raise InvalidInputError(field, "", "at least one character", row)
        cut = len(text) > self.max_bytes
        if cut and not truncate:
            limit = f"at most {self.max_bytes} bytes{self._remedy}"
            raise InvalidInputError(field, f"{len(text)} bytes", limit, row)
        try:
            # The cut may fall inside a character, whose bytes are then left out.
            return codecs.getincrementaldecoder("utf-8")().decode(text[: self.max_bytes], final=not cut)
        except UnicodeDecodeError as error:
            raise InvalidInputError(field, text[:40], f"valid UTF-8 (byte {error.start} is not)", row) from None

    def _refuse_length(self, tokens: int, row: int | None, truncate: bool) -> None:
        if not truncate:
            limit = f"at most {self.max_tokens}{self._remedy}"
            raise InvalidInputError(self._field, f"{tokens} tokens", limit, row)


def _byte_offsets(found: Any, first: str, second: str | None) -> Array:
    offsets = np.array(found.offsets, dtype=np.int32).reshape(-1, 2)
    for number, text in enumerate((first, second)):
        if text is not None and not text.isascii():
            # The tokenizer counts characters.
            starts = np.zeros(len(text) + 1, np.int32)
            np.cumsum([len(character.encode()) for character in text], out=starts[1:])
            own = np.array([sequence == number for sequence in found.sequence_ids])
            offsets[own] = starts[offsets[own]]
    offsets[np.array([sequence is None for sequence in found.sequence_ids])] = -1
    return offsets
