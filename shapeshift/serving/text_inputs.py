"""The text of a request, given as TEXT (with TEXT_PAIR) or as INPUT_IDS with ATTENTION_MASK, as rows of token ids.

NUM_TOKENS: the output of a front that tokenises which says how many ids it read of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shapeshift.errors import InvalidInputError
from shapeshift.serving.model_args import DESCRIPTION, TOKENS, Tensor
from shapeshift.serving.pb_utils import InferenceRequest, PbUtils

Ids = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.int32]

OFFSETS = "OFFSETS"
ENGINE_MS = "ENGINE_MS"
TEXT_PAIR = "TEXT_PAIR"
NUM_TOKENS = Tensor("NUM_TOKENS", "TYPE_INT32", always=True)


class Tokenizer(Protocol):
    """What is needed of `engines.text.tokenizer.TextTokenizer`."""

    max_tokens: int

    def encode(self, text: bytes, row: int, truncate: bool, prompt: str) -> Ids: ...

    def padded(self, ids: Ids) -> Ids: ...

    def encode_with_offsets(self, text: bytes, pair: bytes | None, row: int, truncate: bool, prompt: str) -> Any: ...

    def encode_in(
        self, template: tuple[str, str, str], first: bytes, second: bytes, row: int, truncate: bool
    ) -> Ids: ...


class TextRows(NamedTuple):
    """The ids of each text of a request, and, where requested, the byte positions of its tokens, [tokens, 2]."""

    ids: list[Ids]
    offsets: list[Offsets]


def rows_of_request(
    pb_utils: PbUtils,
    request: InferenceRequest,
    tokenizer: Tokenizer,
    vocabulary: int,
    truncate: bool,
    pairs: bool = False,
    offsets: bool = False,
    prompt: str = "",
    template: tuple[str, str, str] | None = None,
) -> TextRows:
    """The rows of one Triton request, each of 1 to `tokenizer.max_tokens` ids.

    pairs: whether TEXT_PAIR, the second text of each row, may be given; offsets: whether to return token positions
    (-1 for all of INPUT_IDS); prompt: what is put before each TEXT; template: what stands around each pair, instead.
    Raises InvalidInputError naming input, row and limit for anything invalid that config.pbtxt does not exclude.
    """
    text = _texts(pb_utils, request, "TEXT")
    pair = _texts(pb_utils, request, TEXT_PAIR) if pairs else None
    ids = _array(pb_utils, request, "INPUT_IDS")
    mask = _array(pb_utils, request, "ATTENTION_MASK")
    if text is not None and (ids is not None or mask is not None):
        raise InvalidInputError("inputs", "TEXT and INPUT_IDS", "one of the two kinds, not both")
    if pair is not None and (text is None or len(pair) != len(text)):
        raise InvalidInputError(TEXT_PAIR, f"{len(pair)} rows", "as many rows as TEXT has")
    if text is not None and template is not None:
        if pair is None:
            raise InvalidInputError(TEXT_PAIR, None, "given: this model reads pairs")
        both = enumerate(zip(text, pair, strict=True))
        return TextRows([tokenizer.encode_in(template, *texts, row, truncate) for row, texts in both], [])
    if text is not None:
        if not pairs and not offsets:
            return TextRows([tokenizer.encode(value, row, truncate, prompt) for row, value in enumerate(text)], [])
        seconds: Sequence[bytes | None] = pair or [None] * len(text)
        whole = [
            tokenizer.encode_with_offsets(first, second, row, truncate, prompt)
            for row, (first, second) in enumerate(zip(text, seconds, strict=True))
        ]
        return TextRows([one.ids for one in whole], [one.offsets for one in whole] if offsets else [])
    if ids is None:
        raise InvalidInputError("inputs", "none", "TEXT, or INPUT_IDS with ATTENTION_MASK")
    if mask is None:
        raise InvalidInputError("ATTENTION_MASK", None, "given beside INPUT_IDS")
    rows = [tokenizer.padded(row) for row in rows_of_ids(ids, mask, vocabulary, tokenizer.max_tokens, truncate)]
    return TextRows(rows, [np.full((len(row), 2), -1, np.int32) for row in rows] if offsets else [])


def texts_of_request(pb_utils: PbUtils, request: InferenceRequest, pairs: bool) -> list[list[bytes]]:
    """The rows of a request that takes TEXT only: one text each, or with `pairs` a text and its TEXT_PAIR.

    Raises InvalidInputError naming input, row and limit.
    """
    text = _texts(pb_utils, request, "TEXT")
    pair = _texts(pb_utils, request, TEXT_PAIR) if pairs else None
    if text is None:
        raise InvalidInputError("inputs", "none", "TEXT")
    if pairs and (pair is None or len(pair) != len(text)):
        raise InvalidInputError(TEXT_PAIR, None if pair is None else f"{len(pair)} rows", "as many rows as TEXT has")
    return [[one] for one in text] if pair is None else [list(both) for both in zip(text, pair, strict=True)]


def wanted_outputs(request: InferenceRequest, names: Sequence[str]) -> list[str]:
    """Which of the outputs `names` to answer with, in their order; NUM_TOKENS only for a request that names it.

    TOKENS is not among them.
    """
    named = request.requested_output_names()
    # Triton lists every output for a request that names none, and only then stands DESCRIPTION beside others.
    left_out = (TOKENS.name, NUM_TOKENS.name if DESCRIPTION.name in named else "")
    return [name for name in names if name in named and name not in left_out]


def padded_offsets(offsets: Sequence[Offsets]) -> Offsets:
    """OFFSETS, INT32 [rows, longest, 2]: the positions of each row, -1 beyond its end."""
    padded = np.full((len(offsets), max(map(len, offsets)), 2), -1, np.int32)
    for row, of_row in enumerate(offsets):
        padded[row, : len(of_row)] = of_row
    return padded


def _texts(pb_utils: PbUtils, request: InferenceRequest, name: str) -> list[bytes] | None:
    values = _array(pb_utils, request, name)
    if values is None:
        return None
    if values.ndim != 2 or values.shape[1] != 1 or not len(values):
        raise InvalidInputError(name, list(values.shape), "shape [n, 1] with n at least 1")
    return [_bytes(value, name, row) for row, value in enumerate(values[:, 0])]


def rows_of_ids(ids: Ids, mask: Ids, vocabulary: int, max_tokens: int, truncate: bool) -> list[Ids]:
    """Rows of padded ids: INPUT_IDS and ATTENTION_MASK, both INT64 [n, length]; the mask is ones, then zeros."""
    if ids.ndim != 2 or not len(ids):
        raise InvalidInputError("INPUT_IDS", list(ids.shape), "shape [n, length] with n at least 1")
    if ids.shape != mask.shape:
        raise InvalidInputError("ATTENTION_MASK", list(mask.shape), f"the shape of INPUT_IDS, {list(ids.shape)}")
    lengths = mask.sum(axis=1)
    expected = np.arange(ids.shape[1]) < lengths[:, None]
    rows = []
    for row, length in enumerate(lengths.tolist()):
        if not np.array_equal(mask[row], expected[row]):
            raise InvalidInputError("ATTENTION_MASK", mask[row].tolist(), "ones, then zeros", row)
        if length < 1:
            raise InvalidInputError("ATTENTION_MASK", "all zeros", "at least one token", row)
        if length > max_tokens and not truncate:
            limit = f"at most {max_tokens} (or truncate=true)"
            raise InvalidInputError("INPUT_IDS", f"{length} tokens", limit, row)
        tokens = ids[row, : min(length, max_tokens)]
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocabulary:
            raise InvalidInputError("INPUT_IDS", low if low < 0 else high, f"0 to {vocabulary - 1}", row)
        # Copied: Triton frees its buffer when `execute` returns.
        rows.append(np.array(tokens, dtype=np.int64))
    return rows


def _array(pb_utils: PbUtils, request: InferenceRequest, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _bytes(value: Any, name: str, row: int) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise InvalidInputError(name, type(value).__name__, "a text", row)
