"""What one iteration computes: a token of each decoding request, and chunks of prompts beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from shapeshift.fused_decode.sequence import NO_ADAPTER, Sequence
from shapeshift.fused_decode.slots import DECODE, Slots, SlotTable
from shapeshift.fused_decode.step import StepBatch


@dataclass(frozen=True)
class Step:
    """One iteration's batch, and what stands behind its rows.

    slots, lengths  INT64 [rows]         of all rows
    wanted          INT64 [wanted rows]  slots of the rows that get a token
    """

    batch: StepBatch
    slots: Slots
    lengths: Slots
    wanted: Slots


def compose(table: SlotTable, reading: Iterable[Sequence], prefill_tokens: int) -> Step:
    """The next iteration: all decoding slots in order, then the prompts being read, within their budget.

    reading: requests whose prompts are not read to the end yet; those that come first are served first, so that
    one of them speaks soon rather than all of them late.
    """
    decoding = np.flatnonzero(table.phase == DECODE)
    chunks = _chunks(table, reading, prefill_tokens)
    tokens = table.tokens[decoding, table.cached[decoding]]
    slots, lengths = decoding, np.ones(len(decoding), np.int64)
    rows = np.arange(len(slots))
    if chunks:
        slots = np.concatenate([slots, [slot for slot, _ in chunks]])
        lengths = np.concatenate([lengths, [count for _, count in chunks]])
        pieces = [table.tokens[slot, (start := table.cached[slot]) : start + count] for slot, count in chunks]
        tokens = np.concatenate([tokens, *pieces])
        rows = np.flatnonzero(table.cached[slots] + lengths == table.length[slots])
    batch = StepBatch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        slots=torch.from_numpy(slots.astype(np.int32)),
        starts=torch.from_numpy(table.cached[slots].astype(np.int32)),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        wanted=torch.from_numpy(rows),
        adapters=_adapters(table, slots),
    )
    return Step(batch, slots, lengths, slots[rows])


def _adapters(table: SlotTable, slots: Slots) -> torch.Tensor | None:
    """The adapter of each row; None where no row has one."""
    adapters = table.adapters[slots]
    return torch.from_numpy(adapters) if (adapters != NO_ADAPTER).any() else None


def _chunks(table: SlotTable, reading: Iterable[Sequence], budget: int) -> list[tuple[int, int]]:
    """Which slots read how many tokens of their prompts."""
    chunks = []
    for sequence in reading:
        if not budget:
            break
        slot = sequence.slot
        assert slot is not None
        count = min(budget, int(table.length[slot] - table.cached[slot]))
        chunks.append((slot, count))
        budget -= count
    return chunks
