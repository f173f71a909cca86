"""Laying rows of token ids side by side into the tensors of `protocol`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shapeshift.engines.protocol import Array, Ids


def pack(texts: Sequence[Ids], tokens: int, rows: int, position_offset: int = 0) -> dict[str, Array]:
    """The input tensors for `texts` (1-D id arrays, at most `rows` of them, at most `tokens` ids in all).

    Row i is segment i + 1. Positions count from `position_offset` in each row.
    """
    ids = np.zeros((1, tokens), np.int64)
    segments = np.zeros((1, tokens), np.int64)
    positions = np.zeros((1, tokens), np.int64)
    start = 0
    for number, text in enumerate(texts, start=1):
        end = start + len(text)
        ids[0, start:end] = text
        segments[0, start:end] = number
        positions[0, start:end] = _COUNT[position_offset : position_offset + len(text)]
        start = end
    return {"INPUT_IDS": ids, "SEGMENTS": segments, "POSITIONS": positions, "ROWS": _COUNT[1 : rows + 1]}


_COUNT = np.arange(8192, dtype=np.int64)
