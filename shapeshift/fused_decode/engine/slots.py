"""The slots: their owners, their tokens, and the sampling parameters of their requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.engine.sampling import SamplingTable
from shapeshift.fused_decode.interfaces import SlotMemory
from shapeshift.fused_decode.request import NO_ADAPTER, Request

FREE, PREFILL, DECODE = 0, 1, 2

Slots = npt.NDArray[np.int64]


class SlotTable:
    """The state of each slot, as arrays over the slots. Only the generating thread uses it.

    slot_memory: the other user of the slots' memory; None: there is none.

    phase    INT8 [slots]   FREE, PREFILL (its prompt is not complete in the cache) or DECODE
    cached   INT64 [slots]  tokens whose keys and values the model holds
    tokens   INT32 [slots, max_length + 1]  prompt and answer
    length   INT64 [slots]  number of these; a decoding slot has one more than is cached
    adapters INT32 [slots]  the request's adapter
    """

    def __init__(self, slots: int, max_length: int, slot_memory: SlotMemory | None = None) -> None:
        self.owners: list[Request | None] = [None] * slots
        self.phase = np.zeros(slots, np.int8)
        self.cached = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int64)
        self.end = np.zeros(slots, np.int64)
        self.ignore_eos = np.zeros(slots, bool)
        self.adapters = np.full(slots, NO_ADAPTER, np.int32)
        self.tokens = np.zeros((slots, max_length + 1), np.int32)
        self.sampling = SamplingTable(slots, self.tokens)
        self.used = 0
        self._slot_memory = slot_memory

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def free(self) -> int:
        """Slots that a request can have now."""
        if self._slot_memory is None:
            return len(self.owners) - self.used
        return int((self._slot_memory.available() & (self.phase == FREE)).sum())

    def begin_iteration(self) -> None:
        """An iteration begins."""
        if self._slot_memory is not None:
            self._slot_memory.begin_iteration()

    def allocate(self, request: Request) -> int:
        """Give `request` the first free slot."""
        slot = self._first_free()
        if self._slot_memory is not None:
            self._slot_memory.claim(slot)
        params = request.sampling_params
        prompt = len(request.prompt)
        length = prompt + len(request.kept)
        self.owners[slot] = request
        self.used += 1
        self.phase[slot] = PREFILL
        self.cached[slot] = 0
        self.length[slot] = length
        self.end[slot] = prompt + request.limit
        self.ignore_eos[slot] = params.ignore_eos
        self.adapters[slot] = request.adapter_id
        self.tokens[slot, :prompt] = request.prompt
        self.tokens[slot, prompt:length] = request.kept
        self.sampling.set(slot, params, prompt, request.rules, request.grammar)
        request.slot = slot
        return slot

    def release(self, request: Request) -> None:
        """Free the slot of `request`."""
        slot = request.slot
        assert slot is not None and self.owners[slot] is request, "the slot belongs to another request"
        self._vacate(slot)
        self.used -= 1
        request.slot = None

    def preempt(self, request: Request) -> None:
        """Free the slot of `request`, which keeps its tokens; with a slot again, it prefills all of them."""
        slot = request.slot
        assert slot is not None
        request.kept = self.tokens[slot, len(request.prompt) : self.length[slot]].copy()
        self.release(request)

    def clear(self) -> None:
        """Free every slot."""
        for slot, owner in enumerate(self.owners):
            if owner is not None:
                owner.slot = None
                self._vacate(slot)
        self.used = 0

    def advance(self, slots: Slots, lengths: Slots, wanted: Slots, tokens: Slots) -> None:
        """Record an iteration: `lengths` more tokens of `slots` are cached, and each of `wanted` has a new token."""
        self.cached[slots] += lengths
        self.tokens[wanted, self.length[wanted]] = tokens
        self.length[wanted] += 1
        self.phase[wanted] = DECODE

    def check_integrity(self) -> None:
        """Raise AssertionError when the columns contradict one another."""
        if self._slot_memory is not None:
            self._slot_memory.check_integrity()
        held = [slot for slot, owner in enumerate(self.owners) if owner is not None]
        assert self.used == len(held), "the number of held slots is wrong"
        assert held == np.flatnonzero(self.phase).tolist(), "a slot is held without a phase, or the reverse"
        for slot, owner in enumerate(self.owners):
            if owner is None:
                assert self.cached[slot] == self.length[slot] == 0, f"free slot {slot} holds tokens"
                continue
            assert owner.slot == slot and not owner.is_finished, f"slot {slot} is held by a request that has left it"
            assert self.length[slot] == len(owner.prompt) + owner.generated, f"slot {slot} has lost tokens"
            behind = self.length[slot] - self.cached[slot]
            assert behind == 1 or (self.phase[slot] == PREFILL and behind > 1), f"slot {slot} is out of step"

    def _first_free(self) -> int:
        free = self.phase == FREE
        if self._slot_memory is not None:
            free &= self._slot_memory.available()
        return int(free.argmax())

    def _vacate(self, slot: int) -> None:
        self.owners[slot] = None
        self.phase[slot] = FREE
        self.cached[slot] = self.length[slot] = 0
        self.adapters[slot] = NO_ADAPTER
        if self._slot_memory is not None:
            self._slot_memory.vacate(slot)
