"""Packs rows of token ids into the input tensors of `interfaces`, and unpacks the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shapeshift.engines.interfaces import TOKEN_OUTPUTS, Array, Ids


def pack(
    texts: Sequence[Ids], tokens: int, rows: int, position_offset: int = 0, type_stride: int = 0
) -> dict[str, Array]:
    """The input tensors for `texts` (1-D id arrays, at most `rows` of them, at most `tokens` ids in total).

    Row i is segment i + 1. Positions count from `position_offset` in each row; see `_positions`.
    """
    ids = np.zeros((1, tokens), np.int64)
    segments = np.zeros((1, tokens), np.int64)
    positions = np.zeros((1, tokens), np.int64)
    start = 0
    for number, text in enumerate(texts, start=1):
        end = start + len(text)
        ids[0, start:end] = text
        segments[0, start:end] = number
        positions[0, start:end] = _positions(text, position_offset, type_stride)
        start = end
    return {"INPUT_IDS": ids, "SEGMENTS": segments, "POSITIONS": positions, "ROWS": _RANGE[1 : rows + 1]}


def _positions(text: Ids, offset: int, type_stride: int) -> Ids:
    """The positions of a text's tokens. Models that do not count from 0 count from the id of padding: where a text
    contains that token, it has the position before the first one, and the others are counted without it.
    """
    if offset:
        counted = (text % type_stride if type_stride else text) != offset - 1
        if not counted.all():
            return np.where(counted, np.cumsum(counted), 0) + (offset - 1)
    return _RANGE[: len(text)] + offset


def unpack(outputs: Mapping[str, Array], texts: Sequence[Ids]) -> dict[str, Array]:
    """The outputs of the pack of `texts` by text, copied: [texts, ...].

    Outputs with one entry per token become [texts, longest, ...], with zeros beyond a text's end.
    """
    return {
        name: _by_token(values[0], texts) if name in TOKEN_OUTPUTS else values[: len(texts)].copy()
        for name, values in outputs.items()
    }


def _by_token(values: Array, texts: Sequence[Ids]) -> Array:
    padded = np.zeros((len(texts), max(map(len, texts), default=0), *values.shape[1:]), values.dtype)
    start = 0
    for row, text in enumerate(texts):
        padded[row, : len(text)] = values[start : start + len(text)]
        start += len(text)
    return padded


# One more than the most tokens: rows are numbered from 1.
_RANGE = np.arange(8193, dtype=np.int64)
