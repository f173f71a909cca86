"""The inputs of a step at fixed addresses: one flat tensor, which one copy brings to the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model.graphs.bounds import GraphBounds
from shapeshift.fused_decode.model.torch_operations import Rows

_COLUMNS = 4
"""Of a row of one token before its blocks: token, position, slot, whether it is fed."""


@dataclass(frozen=True)
class StepInputs:
    """What a step within bounds is computed from.

    flat    INT64, all of it
    rows    INT64 [bounds.rows, 4 + n]  token, position, slot, 1 where the token is fed (`StepBatch.fed`), and blocks of
                                        each row of one token; a view
    chunk   INT64 [2, bounds.chunk]     tokens and positions of the chunk; a view
    text    INT64 [1 + n]               slot and blocks of the chunk's text; a view
    chosen  INT64 [2, bounds.rows + 1]  of each of `logit_rows` its place among the logits, and its slot; a view
    """

    bounds: GraphBounds
    flat: torch.Tensor
    rows: torch.Tensor
    chunk: torch.Tensor
    text: torch.Tensor
    chosen: torch.Tensor

    @classmethod
    def over(cls, bounds: GraphBounds, flat: torch.Tensor) -> StepInputs:
        """The inputs in `flat`, INT64 [`elements(bounds)`]."""
        width = _COLUMNS + bounds.blocks
        sizes = [bounds.rows * width, 2 * bounds.chunk, 1 + bounds.blocks, 2 * (bounds.rows + 1)]
        rows, chunk, text, chosen = torch.split(flat, sizes)
        return cls(bounds, flat, rows.view(-1, width), chunk.view(2, -1), text, chosen.view(2, -1))

    def fill(self, batch: StepBatch) -> None:
        """Write the step `batch`, which lies within the bounds.

        What is left is filled with a token of the batch, once more: it writes what that token writes, to the same
        place.
        """
        assert batch.blocks is not None
        self.flat.zero_()
        blocks = batch.blocks[:, : self.bounds.blocks].long()
        singles = len(batch.slots) - bool(self.bounds.chunk)
        width = _COLUMNS + blocks.shape[1]
        if self.bounds.chunk:
            start, length, slot = (int(column[-1]) for column in (batch.starts, batch.lengths, batch.slots))
            tokens = batch.tokens[singles:]
            places = torch.arange(self.bounds.chunk).clamp(max=length - 1)
            self.chunk[0], self.chunk[1] = tokens[places], start + places
            self.text[0], self.text[1 : 1 + blocks.shape[1]] = slot, blocks[-1]
            self.rows[:, :_COLUMNS] = torch.tensor([int(tokens[-1]), start + length - 1, slot, 0])
            self.rows[:, _COLUMNS:width] = blocks[-1]
        if singles:
            fed = torch.zeros(singles) if batch.fed is None else batch.fed[:singles]
            columns = torch.stack([one[:singles].long() for one in (batch.tokens, batch.starts, batch.slots, fed)], 1)
            filled = torch.cat([columns, blocks[:singles]], 1)
            self.rows[:, :width] = filled[0]
            self.rows[:singles, :width] = filled
        chunk_row = singles if self.bounds.chunk else -1
        count = len(batch.logit_rows)
        self.chosen[0, :count] = torch.where(batch.logit_rows == chunk_row, self.bounds.rows, batch.logit_rows)
        self.chosen[1, :count] = batch.slots[batch.logit_rows]

    def tokens(self, latest: torch.Tensor) -> torch.Tensor:
        """The tokens of the step, INT64 [rows + chunk]; latest: INT64 [slots], those that are fed."""
        tokens, slots, fed = self.rows[:, 0], self.rows[:, 2], self.rows[:, 3]
        return torch.cat([torch.where(fed > 0, latest[slots], tokens), self.chunk[0]])

    def positions(self) -> torch.Tensor:
        """The place of each token in its text, INT64 [rows + chunk]."""
        return torch.cat([self.rows[:, 1], self.chunk[1]])

    def plan(self) -> tuple[Rows, ...]:
        """The plan of `TorchOperations`."""
        rows, chunk = self.bounds.rows, self.bounds.chunk
        singles = Rows(slice(0, rows), self.rows[:, 1:2], self.rows[:, 2], self.rows[:, _COLUMNS:])
        if not chunk:
            return (singles,)
        return singles, Rows(slice(rows, rows + chunk), self.chunk[1:], self.text[:1], self.text[None, 1:])

    def last(self) -> torch.Tensor:
        """The places in `tokens` after which the step gives logits: all rows, then the end of the chunk; INT64."""
        last = torch.arange(self.bounds.rows + bool(self.bounds.chunk), device=self.flat.device)
        if self.bounds.chunk:
            last[-1] = self.bounds.rows + self.bounds.chunk - 1
        return last


def elements(bounds: GraphBounds) -> int:
    """Elements of `StepInputs.flat`."""
    return bounds.rows * (_COLUMNS + bounds.blocks) + 2 * bounds.chunk + 1 + bounds.blocks + 2 * (bounds.rows + 1)
