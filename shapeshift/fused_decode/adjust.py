"""What a technique may add to the outputs of a step's linears: low-rank terms, row by row."""

from __future__ import annotations

from typing import Protocol

import torch

from shapeshift.fused_decode.step import StepBatch

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""The linears of a layer. Queries, keys and values come from one, one below the other; so do gate and up."""
LINEARS = 4


class Adjustment(Protocol):
    """What is added in one step."""

    def add(self, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add to `outputs` [tokens, width] in place what the rows' adapters make of `inputs` [tokens, inputs]."""
        ...

    def among(self, tokens: torch.Tensor) -> Adjustment | None:
        """The same for these tokens alone, INT64 [n] places in the batch; None where none of them has an adapter."""
        ...


class Adjuster(Protocol):
    """Asked once a step in which a row has an adapter, and in no other."""

    def adjustment(self, batch: StepBatch) -> Adjustment:
        """What is to be added for `batch`, whose `adapters` are stated. Valid until the next call."""
        ...
