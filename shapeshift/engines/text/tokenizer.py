"""Tokenization of texts with the checkpoint's tokenizer.json."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapeshift.errors import InvalidInputError

Ids = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.int32]

FILE_NAME, CONFIG = "tokenizer.json", "tokenizer_config.json"
_BYTES_PER_TOKEN = 128


def open_tokenizer(file: Path) -> Any:
    """The tokenizer in a tokenizer.json, with what `read_config` says; it neither pads nor truncates."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = bool(read_config(file).get("split_special_tokens"))
    return tokenizer


def read_config(file: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer.json: what that cannot hold. Empty if there is none."""
    config = file.with_name(CONFIG)
    return dict(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else {}


class Encoded(NamedTuple):
    """One text or pair: the ids, INT64 [length], and the byte offsets of each token, INT32 [length, 2].

    Offsets are [start, end) in the UTF-8 text; -1 for special tokens and those of a prompt. Offsets of a pair's second
    text refer to it.
    """

    ids: Ids
    offsets: Offsets


class TextTokenizer:
    """Encodes texts of 1 to `max_tokens` tokens, including special tokens. Thread-safe.

    field: the input that errors name; remedy: the advice in the error for a text that is too long; type_stride: added
    to the ids of a pair's second text (`manifest.Manifest.type_stride`); vocab_size: of a model whose embedding may
    have fewer rows than the tokenizer has tokens.
    """

    def __init__(
        self,
        file: Path,
        max_tokens: int,
        field: str = "TEXT",
        remedy: str = " (or truncate=true)",
        type_stride: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self._field = field
        self._remedy = remedy
        self._type_stride = type_stride
        # A longer text is rejected, or truncated, before it is tokenized.
        self.max_bytes = max_tokens * _BYTES_PER_TOKEN
        self._tokenizer = open_tokenizer(file)
        closing = self._tokenizer.encode("a").special_tokens_mask[-1:]
        self._has_closing = closing == [1]
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._vocab_size = None if vocab_size is None or highest < vocab_size else vocab_size

    @property
    def vocabulary(self) -> int:
        """The number of ids, including special tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(
        self,
        text: bytes,
        row: int | None = None,
        truncate: bool = False,
        prompt: str = "",
        add_special_tokens: bool = True,
    ) -> Ids:
        """The ids of one UTF-8 text behind `prompt`, INT64 [length].

        Raises InvalidInputError naming the field and `row` for a text that is empty, invalid UTF-8, too long, or has a
        token that the model lacks. With `truncate` a long text keeps its first tokens and the closing special token.
        """
        decoded = prompt + self._decode(text, self._field, row, truncate)
        ids = self._tokenizer.encode(decoded, add_special_tokens=add_special_tokens).ids
        if not ids:
            raise InvalidInputError(self._field, decoded, "at least one token", row)
        if len(ids) > self.max_tokens:
            self._check_length(len(ids), row, truncate)
            closing = ids[-1:] if self._has_closing else []
            ids = ids[: self.max_tokens - len(closing)] + closing
        self._check_known(ids, row)
        return np.asarray(ids, dtype=np.int64)

    def encode_piece(self, text: str) -> list[int]:
        """The ids of a piece of a text, without special tokens; none for an empty text."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False).ids]

    def encode_with_offsets(
        self,
        text: bytes,
        pair: bytes | None = None,
        row: int | None = None,
        truncate: bool = False,
        prompt: str = "",
    ) -> Encoded:
        """The ids and byte offsets of one text or pair, behind `prompt`. Raises as `encode`.

        Truncation removes tokens from the longer text of a pair.
        """
        first = prompt + self._decode(text, self._field, row, truncate)
        second = None if pair is None else self._decode(pair, f"{self._field}_PAIR", row, truncate)
        encoding = self._tokenizer.encode(first, second)
        if not encoding.ids:
            raise InvalidInputError(self._field, first, "at least one token", row)
        if len(encoding.ids) > self.max_tokens:
            self._check_length(len(encoding.ids), row, truncate)
            encoding = self._truncated(first, second)
        self._check_known(encoding.ids, row)
        ids = np.asarray(encoding.ids, dtype=np.int64)
        if self._type_stride:
            ids += np.asarray(encoding.type_ids, dtype=np.int64) * self._type_stride
        return Encoded(ids, _byte_offsets(encoding, first, second, len(prompt.encode())))

    def _truncated(self, first: str, second: str | None) -> Any:
        """The encoding of as many first tokens of the texts as fit, with special tokens."""
        parts = [self._tokenizer.encode(text, add_special_tokens=False) for text in (first, second) if text is not None]
        budget = self.max_tokens - self._tokenizer.num_special_tokens_to_add(second is not None)
        shorter = min(len(part.ids) for part in parts) if len(parts) > 1 else 0
        for part in parts:
            # The shorter text keeps its tokens, up to half of the budget (rounded up for the first text).
            half = -(-budget // 2) if part is parts[0] else budget // 2
            limit = budget if len(parts) == 1 else max(budget - shorter, half)
            part.truncate(min(len(part.ids), limit))
        return self._tokenizer.post_process(parts[0], parts[1] if len(parts) > 1 else None)

    def _decode(self, text: bytes, field: str, row: int | None, truncate: bool) -> str:
        if not text:
            raise InvalidInputError(field, "", "at least one character", row)
        too_long = len(text) > self.max_bytes
        if too_long and not truncate:
            limit = f"at most {self.max_bytes} bytes{self._remedy}"
            raise InvalidInputError(field, f"{len(text)} bytes", limit, row)
        try:
            # A character that the limit splits is dropped.
            return codecs.getincrementaldecoder("utf-8")().decode(text[: self.max_bytes], final=not too_long)
        except UnicodeDecodeError as error:
            raise InvalidInputError(field, text[:40], f"valid UTF-8 (byte {error.start} is not)", row) from None

    def _check_known(self, ids: list[int], row: int | None) -> None:
        if self._vocab_size is not None and (token := max(ids)) >= self._vocab_size:
            limit = f"tokens that the model has: {token} is not below its vocab_size ({self._vocab_size})"
            raise InvalidInputError(self._field, self._tokenizer.id_to_token(token), limit, row)

    def _check_length(self, tokens: int, row: int | None, truncate: bool) -> None:
        if not truncate:
            limit = f"at most {self.max_tokens}{self._remedy}"
            raise InvalidInputError(self._field, f"{tokens} tokens", limit, row)


def _byte_offsets(encoding: Any, first: str, second: str | None, prompt_bytes: int) -> Offsets:
    offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    for number, text in enumerate((first, second)):
        if text is not None and not text.isascii():
            # The tokenizer gives offsets in characters.
            starts = np.zeros(len(text) + 1, np.int32)
            np.cumsum([len(character.encode()) for character in text], out=starts[1:])
            own = np.array([sequence == number for sequence in encoding.sequence_ids])
            offsets[own] = starts[offsets[own]]
    if prompt_bytes:
        own = np.array([sequence == 0 for sequence in encoding.sequence_ids])
        shifted = offsets[own] - prompt_bytes
        # A token may begin in the prompt and end in the text.
        offsets[own] = np.where(shifted[:, 1:] > 0, np.maximum(shifted, 0), -1)
    offsets[np.array([sequence is None for sequence in encoding.sequence_ids])] = -1
    return offsets
