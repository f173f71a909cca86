"""How the attention of a step is divided among the programs of `gpu_kernels`: from bounds alone, so that it is known
before the step is, and where there is no GPU."""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = 512
"""As many fill any GPU of today."""
_LANE_ELEMENTS = 8192
"""Of the queries of a program, where a row has several tokens: with more, keys and values would not fit beside them."""
_LEAST_LANES, _MOST_LANES = 16, 64
"""A lane is one query of one head. The least is what a GPU multiplies at once."""
_SHORTEST, _LONGEST = 64, 1024
"""Places of a split: fewer do not pay, and more would let one long text outlast all others."""
_F32_BYTES = 4


@dataclass(frozen=True)
class Division:
    """What each program computes: some tokens of a row, the heads that share keys and values, a share of the places.

    queries  tokens of a program
    lanes    a power of two, at least queries times these heads
    tiles    programs that a row's tokens need
    splits   programs among which the places of each are divided
    """

    queries: int
    lanes: int
    tiles: int
    splits: int


def divide(rows: int, length: int, context: int, heads: int, kv_heads: int, head_dim: int, window: int = 0) -> Division:
    """The division of rows of `length` tokens each, over `context` places of each text.

    window: see `network.AttentionLayer`.
    """
    group = heads // kv_heads
    most = min(max(_LANE_ELEMENTS // head_dim, _LEAST_LANES), _MOST_LANES)
    # Not fewer for short chunks: what is compiled does not depend on lengths.
    queries = max(1, most // group) if length > 1 else 1
    lanes = max(_LEAST_LANES, 1 << (queries * group - 1).bit_length())
    tiles = -(-length // queries)
    seen = min(context, window + queries - 1) if window else context
    splits = -(-PROGRAMS // (rows * tiles * kv_heads))
    if length == 1:
        splits = max(splits, -(-seen // _LONGEST))
    return Division(queries, lanes, tiles, min(splits, -(-seen // _SHORTEST)))


def parts_bytes(rows: int, length: int, context: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of what the splits of such rows give, before it is combined: at most, whatever the window."""
    splits = divide(rows, length, context, heads, kv_heads, head_dim).splits
    return rows * length * heads * splits * (head_dim + 1) * _F32_BYTES if splits > 1 else 0
