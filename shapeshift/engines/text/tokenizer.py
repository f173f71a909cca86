"""Tokenization of texts with the checkpoint's tokenizer.json."""

from __future__ import annotations

import codecs
import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapeshift.errors import InvalidInputError

Ids = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.int32]

FILE_NAME, CONFIG = "tokenizer.json", "tokenizer_config.json"
PADS = "shapeshift_pads"
"""The key of CONFIG, as a build writes it, where every text is padded as FILE_NAME says."""
PairTemplate = tuple[str, str, str]
"""What stands before, between and behind the two texts of a pair that a decoder reads."""
_BYTES_PER_TOKEN = 128
_TRUNCATES = "parameter truncate_prompt_tokens"


def open_tokenizer(file: Path) -> Any:
    """The tokenizer in a tokenizer.json, with what `read_config` says; it does not truncate, and pads for PADS only."""
    # A call has one text: handing it to threads of the library would only cost.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    tokenizer, config = Tokenizer.from_file(str(file)), read_config(file)
    if PADS not in config:
        tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    return tokenizer


def read_config(file: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer.json: what that cannot hold. Empty if there is none.

    Raises InvalidInputError for a file that is no JSON object.
    """
    config = file.with_name(CONFIG)
    try:
        return dict(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else {}
    except (ValueError, TypeError) as error:
        raise InvalidInputError("checkpoint", str(config), f"a JSON object ({error})") from None


class Encoded(NamedTuple):
    """One text or pair: the ids, INT64 [length], and the byte offsets of each token, INT32 [length, 2].

    Offsets are [start, end) in the UTF-8 text; -1 for special tokens and those of a prompt. Offsets of a pair's second
    text refer to it.
    """

    ids: Ids
    offsets: Offsets


class _Tokens(NamedTuple):
    """The ids of a text or pair; `chosen` picks them from those of the library's encoding of these texts."""

    ids: Ids
    chosen: slice | npt.NDArray[np.bool_]
    encoding: Any
    first: str
    second: str | None


class TextTokenizer:
    """Encodes texts of 1 to `max_tokens` tokens, including special tokens. Thread-safe.

    field: the input that errors name; remedy: the advice in the error for a text that is too long; type_stride: added
    to the ids of a pair's second text (`manifest.Manifest.type_stride`); vocab_size: of a model whose embedding may
    have fewer rows than the tokenizer has tokens; with a type_stride, that is the limit instead.
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
        config = read_config(file)
        self._cut_side = str(config.get("truncation_side", "right"))
        self._unknown = config.get("unk_token")
        self._limit = "max_tokens"
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        limit = vocab_size if vocab_size is None else type_stride or vocab_size
        self._vocab_size = None if limit is None or highest < limit else limit

    def limited(self, tokens: int) -> TextTokenizer:
        """The same for texts of at most so many tokens, as the request parameter truncate_prompt_tokens says.

        Raises InvalidInputError for more tokens than the model reads. -1: as many as that.
        """
        if tokens > self.max_tokens:
            raise InvalidInputError(_TRUNCATES, tokens, f"at most {self.max_tokens}, the tokens that the model reads")
        shorter = copy.copy(self)
        if tokens > 0:
            shorter.max_tokens, shorter._limit = tokens, _TRUNCATES
        return shorter

    def padded(self, ids: Ids) -> Ids:
        """`ids` as they are computed: filled up where the model reads padding, whatever a client's mask says of it."""
        padding = self._tokenizer.padding
        if padding is None or len(ids) >= padding["length"]:
            return ids
        missing = padding["length"] - len(ids)
        ends = (missing, 0) if padding["direction"] == "left" else (0, missing)
        return np.pad(ids, ends, constant_values=padding["pad_id"])

    @property
    def marks_continuations(self) -> bool:
        """Whether names of tokens that continue a word have a prefix, as those of WordPiece."""
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    @property
    def unknown(self) -> int | None:
        """The id for what the vocabulary lacks; None where there is none."""
        name = self._unknown.get("content") if isinstance(self._unknown, dict) else self._unknown
        token: int | None = self._tokenizer.token_to_id(name) if name else None
        return token

    def names(self, ids: Sequence[int]) -> list[str]:
        """The names of tokens in the vocabulary."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def joined(self, tokens: Sequence[str]) -> str:
        """The text of tokens, by their names."""
        decoder = self._tokenizer.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode([*tokens]))

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
        token that the model lacks. With `truncate` a long text keeps its first tokens, or the last ones where
        transformers cuts the beginning, and the special tokens.
        """
        return self._encoded(text, None, row, truncate, prompt, add_special_tokens).ids

    def listed(self, text: bytes, row: int | None = None, prompt: str = "") -> bytes:
        """JSON of the tokens of a text behind `prompt`, special tokens too, also of more than `max_tokens`.

        An object with the whole `text`, and for each token `ids`, `tokens` (its name in the vocabulary), `special`
        (whether it stands around the text) and `offsets` ([start, end) in characters). Raises as `encode`.
        """
        whole = prompt + self._decode(text, self._field, row, False)
        encoding = self._tokenizer.encode(whole)
        listed = {"text": whole, "ids": encoding.ids, "tokens": encoding.tokens, "offsets": encoding.offsets}
        return json.dumps({**listed, "special": encoding.special_tokens_mask}, ensure_ascii=False).encode()

    def listed_ids(self, ids: Sequence[int]) -> bytes:
        """As `listed` for the text of these ids, without `special` and `offsets`."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return json.dumps({"text": text, "ids": [*ids], "tokens": self.names(ids)}, ensure_ascii=False).encode()

    def special_texts(self) -> dict[int, str]:
        """The texts of the special tokens, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special}

    def encode_piece(self, text: str) -> list[int]:
        """The ids of a piece of a text, without special tokens; none for an empty text."""
        return [int(token) for token in self._tokenize(text, add_special_tokens=False).ids]

    def encode_with_offsets(
        self,
        text: bytes,
        pair: bytes | None = None,
        row: int | None = None,
        truncate: bool = False,
        prompt: str = "",
    ) -> Encoded:
        """The ids and byte offsets of one text or pair, behind `prompt`. Raises as `encode`.

        Truncation removes tokens from the longer text of a pair, as the strategy longest_first of transformers.
        """
        tokens = self._encoded(text, pair, row, truncate, prompt, offsets=True)
        ids = tokens.ids
        if self._type_stride:
            ids += np.asarray(tokens.encoding.type_ids, dtype=np.int64)[tokens.chosen] * self._type_stride
        offsets = _byte_offsets(tokens.encoding, tokens.first, tokens.second, len(prompt.encode()))
        return Encoded(ids, offsets[tokens.chosen])

    def encode_in(self, template: PairTemplate, first: bytes, second: bytes, row: int, truncate: bool) -> Ids:
        """The ids of a pair within a template. Raises as `encode`. What is cut off is the end of the second text."""
        before, between, behind = template
        texts = [self._decode(text, self._field + end, row, truncate) for text, end in ((first, ""), (second, "_PAIR"))]
        whole = before + texts[0] + between + texts[1] + behind
        ids = self.encode_piece(whole)
        if len(ids) > self.max_tokens:
            self._check_length(len(ids), row, truncate)
            end_ids = self.encode_piece(behind)
            least = len(end_ids) + 1
            if self.max_tokens < least:
                raise InvalidInputError(self._limit, self.max_tokens, f"at least {least}, what stands behind a pair")
            ids = [*ids[: self.max_tokens - len(end_ids)], *end_ids]
        chosen = np.asarray(ids, dtype=np.int64)
        self._check_known(chosen, row)
        return chosen

    def _encoded(
        self,
        text: bytes,
        pair: bytes | None,
        row: int | None,
        truncate: bool,
        prompt: str,
        add_special_tokens: bool = True,
        offsets: bool = False,
    ) -> _Tokens:
        first = prompt + self._decode(text, self._field, row, truncate)
        second = None if pair is None else self._decode(pair, f"{self._field}_PAIR", row, truncate)
        encoding = self._tokenize(first, second, add_special_tokens, offsets)
        ids = np.asarray(encoding.ids, dtype=np.int64)
        if not len(ids):
            raise InvalidInputError(self._field, first, "at least one token", row)
        chosen: slice | npt.NDArray[np.bool_] = slice(None)
        if len(ids) > self.max_tokens:
            self._check_length(len(ids), row, truncate)
            chosen = self._fitting(encoding.sequence_ids)
        self._check_known(ids[chosen], row)
        return _Tokens(ids[chosen], chosen, encoding, first, second)

    def _tokenize(
        self, first: str, second: str | None = None, add_special_tokens: bool = True, offsets: bool = False
    ) -> Any:
        """The library's encoding; without `offsets` all of those are 0."""
        # Only the calls for lists free Python's lock: engines and streams go on meanwhile.
        library = self._tokenizer
        encode = library.encode_batch if offsets else library.encode_batch_fast
        return encode([first if second is None else (first, second)], add_special_tokens=add_special_tokens)[0]

    def _fitting(self, sequences: Sequence[int | None]) -> npt.NDArray[np.bool_]:
        """Which tokens stay of a text or pair that is too long; sequences: the text of each, None for special tokens.

        It is what transformers' strategy longest_first leaves.
        """
        texts = [np.flatnonzero([number == text for number in sequences]) for text in (0, 1)]
        lengths = [len(places) for places in texts]
        special = len(sequences) - sum(lengths)
        room, least = self.max_tokens - special, sum(length > 0 for length in lengths)
        if room < least:
            raise InvalidInputError(self._limit, self.max_tokens, f"at least {special + least} for {self._field}")
        # The shorter text keeps its tokens, up to half of the room; of equal ones the second gets the odd token.
        shorter = min(*lengths, room // 2)
        limits = (room - shorter, shorter) if lengths[0] > lengths[1] else (shorter, room - shorter)
        chosen = np.array([number is None for number in sequences])
        for places, limit in zip(texts, limits, strict=True):
            chosen[places[:limit] if self._cut_side == "right" else places[len(places) - limit :]] = True
        return chosen

    def _decode(self, text: bytes, field: str, row: int | None, truncate: bool) -> str:
        if not text:
            raise InvalidInputError(field, "", "at least one character", row)
        too_long = len(text) > self.max_bytes
        # What is cut off before a text is tokenized is its end.
        if too_long and not (truncate and self._cut_side == "right"):
            limit = f"at most {self.max_bytes} bytes{self._remedy}"
            raise InvalidInputError(field, f"{len(text)} bytes", limit, row)
        try:
            # A character that the limit splits is dropped.
            return codecs.getincrementaldecoder("utf-8")().decode(text[: self.max_bytes], final=not too_long)
        except UnicodeDecodeError as error:
            raise InvalidInputError(field, text[:40], f"valid UTF-8 (byte {error.start} is not)", row) from None

    def _check_known(self, ids: Ids, row: int | None) -> None:
        if self._vocab_size is not None and (token := int(ids.max())) >= self._vocab_size:
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
            of_text = np.array([sequence == number for sequence in encoding.sequence_ids])
            offsets[of_text] = starts[offsets[of_text]]
    if prompt_bytes:
        of_text = np.array([sequence == 0 for sequence in encoding.sequence_ids])
        shifted = offsets[of_text] - prompt_bytes
        # A token may begin in the prompt and end in the text.
        offsets[of_text] = np.where(shifted[:, 1:] > 0, np.maximum(shifted, 0), -1)
    offsets[np.array([sequence is None for sequence in encoding.sequence_ids])] = -1
    return offsets
