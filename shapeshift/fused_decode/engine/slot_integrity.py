"""What holds for the slots between two iterations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shapeshift.fused_decode.engine.slots import PREFILL, RESERVED, SlotTable
from shapeshift.fused_decode.interfaces import blocks_of
from shapeshift.fused_decode.request import Request


def check(table: SlotTable, prefilling: Iterable[Request]) -> None:
    """Raise AssertionError when the columns contradict one another, or the requests that are said to prefill."""
    in_phase = {owner for owner, phase in zip(table.owners, table.phase, strict=True) if phase == PREFILL}
    assert {*prefilling} == in_phase, "a prompt is lost"
    table.pool.check_integrity([table.blocks[slot, :held] for slot, held in enumerate(table.held)])
    assert not table.drafted.any(), "a proposal outlives its iteration"
    held = [slot for slot, owner in enumerate(table.owners) if owner is not None]
    assert table.used == len(held), "the number of held slots is wrong"
    assert held == np.flatnonzero(table.phase).tolist(), "a slot is held without a phase, or the reverse"
    requests = {owner: owner.slots for owner in table.owners if owner is not None}
    assert sorted(slot for slots in requests.values() for slot in slots) == held, "a request has lost a slot"
    assert all(len(slots) == request.rows for request, slots in requests.items()), "a request has lost a beam"
    for slot in range(len(table)):
        _check_slot(table, slot)


def _check_slot(table: SlotTable, slot: int) -> None:
    owner, length, blocks = table.owners[slot], table.length[slot], table.held[slot]
    if owner is None:
        assert table.cached[slot] == length == blocks == 0, f"free slot {slot} holds tokens"
        return
    assert slot in owner.slots and owner.slot is not None, f"slot {slot} is held by a request that left it"
    assert not owner.is_finished, f"slot {slot} is held by a finished request"
    assert table.is_beam[slot] == (owner.beams is not None), f"slot {slot} is taken for a beam, or the reverse"
    if table.phase[slot] == RESERVED:
        assert table.cached[slot] == length == 0 and blocks == 1, f"the reserved slot {slot} holds tokens"
        return
    assert length == len(owner.prompt) + owner.generated + table.unknown[slot], f"slot {slot} has lost tokens"
    needed = blocks_of(max(table.cached[slot], length - 1))
    assert needed <= blocks <= needed + 1, f"slot {slot} has {blocks} blocks for {needed}"
    behind = length - table.cached[slot]
    assert behind == 1 or (table.phase[slot] == PREFILL and behind > 1), f"slot {slot} is out of step"
    if owner.beams is not None:
        answer = owner.beams.answers[owner.slots.index(slot)]
        assert np.array_equal(table.tokens[slot, len(owner.prompt) : length], answer), f"beam {slot} has another text"
