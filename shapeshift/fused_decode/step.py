"""One iteration's work, and what the decode loop asks of a model: the line between the two.

A *slot* holds the keys and values of one running request: up to `max_length` tokens of it. A *row* is one
request's share of one iteration: a single token while it decodes, a chunk of its prompt before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepBatch:
    """Rows of one iteration: decode rows (one token) and prefill chunks (several) side by side.

    tokens   INT64 [total]        all rows' tokens one after another
    slots    INT32 [rows]         cache slot of each row; no slot twice
    starts   INT32 [rows]         tokens already in that slot's cache: the position of the row's first token
    lengths  INT32 [rows]         tokens of the row in this step, at least 1
    wanted   INT64 [wanted rows]  indices into the rows whose last token's logits are wanted; may be empty
    adapters INT32 [rows]         the adapter that changes each row, -1 for none; None: no row has one
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    wanted: torch.Tensor
    adapters: torch.Tensor | None = None


class Runtime(Protocol):
    """A loaded causal language model with its cache. Called by one thread, the one that generates."""

    vocab_size: int
    max_length: int
    """Tokens a slot holds: prompt and answer together."""
    slots: int
    eos_ids: frozenset[int]

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's keys and values into the cache; FLOAT32 [wanted rows, vocab_size] logits.

        The result is valid until the next call.
        """
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of the cache of slot `source` over those of slot `target`."""
        ...
