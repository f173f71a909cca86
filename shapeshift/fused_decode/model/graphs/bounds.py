"""Which steps one CUDA graph computes: those within the same bounds. There are few of them, so few graphs."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch

CHUNKS = (64, 128, 256)
"""Tokens of the chunk of a prompt in a mixed step."""
MIXED_ROWS = (8, 32)
"""Rows of single tokens in a mixed step."""
LEAST_CONTEXT = 64
"""Places of each text, at least, unless no text has as many."""


@dataclass(frozen=True)
class GraphBounds:
    """The steps that one graph computes.

    rows     rows of one token
    context  places of each text
    chunk    tokens of one chunk of a prompt behind these rows; 0: none
    linears  to which adapters add terms, see `interfaces.GraphHook`; 0: no row has one
    """

    rows: int
    context: int
    chunk: int = 0
    linears: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of each text."""
        return self.context // BLOCK_TOKENS


def bounds_of(batch: StepBatch, slots: int, longest: int, linears: int = 0) -> GraphBounds | None:
    """The bounds of `batch` for a model of so many slots, with blocks for texts of `longest` tokens.

    linears: what `GraphHook.linears` says of a batch with adapters.

    None where no graph computes it: with adapters and no `linears`, with logits of further tokens, with several chunks,
    or with one that is longer than the longest of CHUNKS or not the last row.
    """
    lengths = batch.lengths.tolist()
    chunks = [length for length in lengths if length > 1]
    if (batch.adapters is not None and not linears) or batch.further is not None or len(chunks) > 1:
        return None
    context = power_of_two(int((batch.starts + batch.lengths).max()), LEAST_CONTEXT, longest)
    if not chunks:
        return GraphBounds(power_of_two(len(lengths), 1, slots), context, linears=linears)
    singles = len(lengths) - 1
    if lengths[-1] == 1 or chunks[0] > CHUNKS[-1]:
        return None
    chunk = next(size for size in CHUNKS if size >= chunks[0])
    return GraphBounds(mixed_rows(singles, slots), context, chunk, linears)


def mixed_rows(singles: int, slots: int) -> int:
    """The rows of the bounds of a mixed step with `singles` rows of one token."""
    return next((size for size in MIXED_ROWS if size >= singles), power_of_two(max(singles, 1), 1, slots))


def power_of_two(count: int, least: int, most: int) -> int:
    """The smallest power of two that is at least `count` and `least`; at most `most`."""
    return min(max(least, 1 << (count - 1).bit_length()), most)
