"""What a technique may add to the outputs of a step's linears: low-rank terms, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shapeshift.fused_decode.step import StepBatch

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""The linears of a layer. Queries, keys and values come from one, one below the other; so do gate and up."""
LINEARS = 4


@dataclass(frozen=True)
class Groups:
    """The tokens of a batch by group.

    tokens  how many the batch has
    firsts  INT32 [groups + 1]: group g has the tokens order[firsts[g]:firsts[g + 1]]
    order   INT32 [tokens in a group], no token twice
    """

    tokens: int
    firsts: torch.Tensor
    order: torch.Tensor

    def each(self) -> list[torch.Tensor]:
        """The tokens of each group, INT64 [n]."""
        ends = self.firsts.tolist()
        return [self.order[start:end].long() for start, end in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True)
class LowRank:
    """Low-rank terms as plain arrays: to a token's outputs are added its inputs times the A and the B of its group.

    memory  what the factors lie in, flat, of the linears' dtype
    places  INT64 [groups, layers, LINEARS, 3, 4]: for up to three parts of a linear's outputs the offset in memory,
            the rank, the first output and how many; rank 0: nothing is added. At the offset lies A, [rank, inputs],
            and right behind it B, [rank, outputs], scaled
    all     the tokens of the batch
    last    those whose logits are wanted, numbered among themselves
    """

    memory: torch.Tensor
    places: torch.Tensor
    all: Groups
    last: Groups

    def arrays(self) -> list[torch.Tensor]:
        """What `kernels/added.h` takes, in its order."""
        return [self.memory, self.places, self.all.firsts, self.all.order, self.last.firsts, self.last.order]


class Adjustment(Protocol):
    """What is added in one step."""

    def add(self, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add to `outputs` [tokens, width] in place what the rows' adapters make of `inputs` [tokens, inputs]."""
        ...

    def among(self, tokens: torch.Tensor) -> Adjustment | None:
        """The same for these tokens alone, INT64 [n] places in the batch; None where none of them has an adapter."""
        ...

    def low_rank(self, last: torch.Tensor) -> LowRank | None:
        """The same as plain arrays, with the tokens at `last`, INT64 [n]; None where it is to be had by `add` alone."""
        ...


class Adjuster(Protocol):
    """Asked once a step in which a row has an adapter, and in no other."""

    def adjustment(self, batch: StepBatch) -> Adjustment:
        """What is to be added for `batch`, whose `adapters` are stated. Valid until the next call."""
        ...
