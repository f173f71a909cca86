"""The text of a request, given as TEXT or as INPUT_IDS with ATTENTION_MASK, as rows of token ids."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shapeshift.errors import InvalidInputError

Ids = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What is needed of `engines.tokenizer.TextTokenizer`."""

    max_tokens: int

    def encode(self, text: bytes, row: int, truncate: bool) -> Ids: ...


def rows_of_request(pb_utils: Any, request: Any, tokenizer: Tokenizer, vocabulary: int, truncate: bool) -> list[Ids]:
    """The rows of one Triton request, each a 1-D INT64 array of 1 to `tokenizer.max_tokens` ids.

    Raises InvalidInputError naming input, row and limit for anything that config.pbtxt does not rule out.
    """
    text = _array(pb_utils, request, "TEXT")
    ids = _array(pb_utils, request, "INPUT_IDS")
    mask = _array(pb_utils, request, "ATTENTION_MASK")
    if text is not None and (ids is not None or mask is not None):
        raise InvalidInputError("inputs", "TEXT and INPUT_IDS", "one of the two kinds, not both")
    if text is not None:
        if text.ndim != 2 or text.shape[1] != 1 or not len(text):
            raise InvalidInputError("TEXT", list(text.shape), "shape [n, 1] with n at least 1")
        return [tokenizer.encode(_bytes(value, row), row, truncate) for row, value in enumerate(text[:, 0])]
    if ids is None:
        raise InvalidInputError("inputs", "none", "TEXT, or INPUT_IDS with ATTENTION_MASK")
    if mask is None:
        raise InvalidInputError("ATTENTION_MASK", None, "given beside INPUT_IDS")
    return rows_of_ids(ids, mask, vocabulary, tokenizer.max_tokens, truncate)


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
        own = ids[row, : min(length, max_tokens)]
        low, high = int(own.min()), int(own.max())
        if low < 0 or high >= vocabulary:
            raise InvalidInputError("INPUT_IDS", low if low < 0 else high, f"0 to {vocabulary - 1}", row)
        # Copied: Triton's buffer is gone once `execute` has returned.
        rows.append(np.array(own, dtype=np.int64))
    return rows


def _array(pb_utils: Any, request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _bytes(value: Any, row: int) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise InvalidInputError("TEXT", type(value).__name__, "a text", row)
