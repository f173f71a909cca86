"""Text to vocabulary ids, with the checkpoint's own tokenizer.json."""

from __future__ import annotations

import codecs
from pathlib import Path

import numpy as np

from shapeshift.engines.protocol import Ids
from shapeshift.errors import InvalidInputError

FILE_NAME = "tokenizer.json"
_BYTES_PER_TOKEN = 128


class TextTokenizer:
    """Encodes texts of 1 to `max_tokens` tokens, special ones counted. Safe to share between threads.

    field: the input that errors name; remedy: what they offer to who sends too long a text.
    """

    def __init__(self, file: Path, max_tokens: int, field: str = "TEXT", remedy: str = " (or truncate=true)") -> None:
        from tokenizers import Tokenizer

        self.max_tokens = max_tokens
        self._field = field
        self._remedy = remedy
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
        if not text:
            raise InvalidInputError(self._field, "", "at least one character", row)
        cut = len(text) > self.max_bytes
        if cut and not truncate:
            limit = f"at most {self.max_bytes} bytes{self._remedy}"
            raise InvalidInputError(self._field, f"{len(text)} bytes", limit, row)
        try:
            # The cut may fall inside a character, whose bytes are then left out.
            decoded = codecs.getincrementaldecoder("utf-8")().decode(text[: self.max_bytes], final=not cut)
        except UnicodeDecodeError as error:
            raise InvalidInputError(self._field, text[:40], f"valid UTF-8 (byte {error.start} is not)", row) from None
        ids = self._tokenizer.encode(decoded).ids
        if not ids:
            raise InvalidInputError(self._field, decoded, "at least one token", row)
        if len(ids) > self.max_tokens:
            if not truncate:
                limit = f"at most {self.max_tokens}{self._remedy}"
                raise InvalidInputError(self._field, f"{len(ids)} tokens", limit, row)
            closing = ids[-1:] if self._special > 1 else []
            ids = ids[: self.max_tokens - len(closing)] + closing
        return np.asarray(ids, dtype=np.int64)
