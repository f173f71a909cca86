"""The batch of one iteration: a token of each decoding request, and chunks of prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from shapeshift.fused_decode.engine.slots import DECODE, Slots, SlotTable
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.request import NO_ADAPTER, Request


@dataclass(frozen=True)
class Step:
    """One iteration's batch, and the slots of its rows.

    slots, lengths  INT64 [rows]         slot and tokens of each row
    wanted          INT64 [wanted rows]  slots of the rows that get a token
    """

    batch: StepBatch
    slots: Slots
    lengths: Slots
    wanted: Slots


def compose(table: SlotTable, prefilling: Iterable[Request], prefill_tokens: int) -> Step:
    """The next iteration: all decoding slots in order, then chunks of prompts, at most `prefill_tokens` together.

    The rows are numbered anew each time, so that there are no gaps where requests have ended.

    prefilling: requests whose prompts are not complete in the cache, in order of admission. The first ones get the
    budget first: one request that gets its first token soon is better than several that all get it late.
    """
    decoding = np.flatnonzero(table.phase == DECODE)
    chunks = _chunks(table, prefilling, prefill_tokens)
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
        spans=torch.from_numpy(table.end[slots].astype(np.int32)),
    )
    return Step(batch, slots, lengths, slots[rows])


def _adapters(table: SlotTable, slots: Slots) -> torch.Tensor | None:
    """The adapter of each row; None where no row has one."""
    adapters = table.adapters[slots]
    return torch.from_numpy(adapters) if (adapters != NO_ADAPTER).any() else None


def _chunks(table: SlotTable, prefilling: Iterable[Request], budget: int) -> list[tuple[int, int]]:
    """(slot, tokens of its prompt) of each chunk."""
    chunks = []
    for request in prefilling:
        if not budget:
            break
        slot = request.slot
        assert slot is not None
        count = min(budget, int(table.length[slot] - table.cached[slot]))
        chunks.append((slot, count))
        budget -= count
    return chunks
