"""The slots: who holds which, how far each has come, and what one iteration computes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.compact import Compaction, compact
from shapeshift.fused_decode.sampling import SamplingTable
from shapeshift.fused_decode.sequence import NO_ADAPTER, Sequence

FREE, PREFILL, DECODE = 0, 1, 2

Slots = npt.NDArray[np.int64]


class Ground(Protocol):
    """Who else uses the memory of slots that no request holds. Called by the generating thread."""

    def begin(self) -> None:
        """An iteration begins: nobody computes, and requests are admitted next."""
        ...

    def open(self) -> npt.NDArray[np.bool_]:
        """BOOL [slots]: which of them a request may have now, held ones included."""
        ...

    def take(self, slot: int) -> None:
        """A request gets `slot`, which is open: whatever else lies there is given up."""
        ...

    def leave(self, slot: int) -> None:
        """`slot` is free again."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when what it knows of the slots contradicts itself."""
        ...


class SlotTable:
    """What the loop knows of each slot, as arrays over the slots. Used by the generating thread alone.

    ground: who else uses the slots' memory; None: nobody.

    phase    INT8 [slots]   FREE, PREFILL (its prompt is not read to the end yet) or DECODE
    cached   INT64 [slots]  tokens whose keys and values the model holds
    tokens   INT32 [slots, max_length + 1]  prompt and answer
    length   INT64 [slots]  how many of them; a decoding slot has one more than is cached
    adapters INT32 [slots]  the request's adapter
    """

    def __init__(self, slots: int, max_length: int, ground: Ground | None = None) -> None:
        self.owners: list[Sequence | None] = [None] * slots
        self.phase = np.zeros(slots, np.int8)
        self.cached = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int64)
        self.end = np.zeros(slots, np.int64)
        self.ignore_eos = np.zeros(slots, bool)
        self.adapters = np.full(slots, NO_ADAPTER, np.int32)
        self.tokens = np.zeros((slots, max_length + 1), np.int32)
        self.sampling = SamplingTable(slots)
        self.used = 0
        self._ground = ground

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def free(self) -> int:
        if self._ground is None:
            return len(self.owners) - self.used
        return int((self._ground.open() & (self.phase == FREE)).sum())

    def begin(self) -> None:
        """An iteration begins."""
        if self._ground is not None:
            self._ground.begin()

    def seat(self, sequence: Sequence) -> int:
        """Give `sequence` a free slot: a hole between others, or else one beside them, below if there is one."""
        slot = self._nearest_free()
        if self._ground is not None:
            self._ground.take(slot)
        parameters = sequence.parameters
        prompt = len(sequence.prompt)
        length = prompt + len(sequence.kept)
        self.owners[slot] = sequence
        self.used += 1
        self.phase[slot] = PREFILL
        self.cached[slot] = 0
        self.length[slot] = length
        self.end[slot] = prompt + sequence.limit
        self.ignore_eos[slot] = parameters.ignore_eos
        self.adapters[slot] = sequence.adapter_id
        self.tokens[slot, :prompt] = sequence.prompt
        self.tokens[slot, prompt:length] = sequence.kept
        self.sampling.set(slot, parameters)
        sequence.slot = slot
        return slot

    def release(self, sequence: Sequence) -> None:
        """Free the slot of `sequence`."""
        slot = sequence.slot
        assert slot is not None and self.owners[slot] is sequence, "the slot belongs to another request"
        self._vacate(slot)
        self.used -= 1
        sequence.slot = None

    def set_aside(self, sequence: Sequence) -> None:
        """Free the slot of `sequence`, which keeps its tokens: seated again, it reads them all and goes on."""
        slot = sequence.slot
        assert slot is not None
        sequence.kept = self.tokens[slot, len(sequence.prompt) : self.length[slot]].copy()
        self.release(sequence)

    def clear(self) -> None:
        """Free every slot."""
        for slot, owner in enumerate(self.owners):
            if owner is not None:
                owner.slot = None
                self._vacate(slot)
        self.used = 0

    def advance(self, slots: Slots, lengths: Slots, wanted: Slots, tokens: Slots) -> None:
        """Record an iteration: so many more tokens of `slots` are cached, and `wanted` have a new token each."""
        self.cached[slots] += lengths
        self.tokens[wanted, self.length[wanted]] = tokens
        self.length[wanted] += 1
        self.phase[wanted] = DECODE

    def move(self, source: int, target: int, copy: Callable[[int, int, int], None]) -> int:
        """Let the owner of `source` continue in `target`, once `copy(source, target, tokens)` has moved what is cached.

        Returns how many tokens that were.
        """
        sequence = self.owners[source]
        assert sequence is not None and self.owners[target] is None, "only a held slot moves, and only to a free one"
        if self._ground is not None:
            self._ground.take(target)
        for values in (self.phase, self.cached, self.length, self.end, self.ignore_eos, self.adapters):
            values[target] = values[source]
        length, cached = int(self.length[source]), int(self.cached[source])
        self.tokens[target, :length] = self.tokens[source, :length]
        self.sampling.move(source, target)
        copy(source, target, cached)
        self.owners[target] = sequence
        sequence.slot = target
        self._vacate(source)
        return cached

    def scattered(self) -> Compaction | None:
        """The moves that bring the held slots together; None where they lie together, or may not."""
        if not self.used:
            return None
        held = np.flatnonzero(self.phase)
        if held[-1] - held[0] + 1 == self.used:
            return None
        # A slot without any cached token still has to move, so it weighs something.
        found = compact(np.where(self.phase, np.maximum(self.cached, 1), 0).tolist())
        if self._ground is not None and not self._ground.open()[[target for _, target in found.moves]].all():
            return None
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError when the columns contradict one another."""
        if self._ground is not None:
            self._ground.check_integrity()
        held = [slot for slot, owner in enumerate(self.owners) if owner is not None]
        assert self.used == len(held), "the number of held slots is off"
        assert held == np.flatnonzero(self.phase).tolist(), "a slot is held without a phase, or the reverse"
        for slot, owner in enumerate(self.owners):
            if owner is None:
                assert self.cached[slot] == self.length[slot] == 0, f"free slot {slot} holds tokens"
                continue
            assert owner.slot == slot and not owner.ended, f"slot {slot} is held by a request that has left it"
            assert self.length[slot] == len(owner.prompt) + owner.generated, f"slot {slot} has lost tokens"
            behind = self.length[slot] - self.cached[slot]
            assert behind == 1 or (self.phase[slot] == PREFILL and behind > 1), f"slot {slot} is out of step"

    def _nearest_free(self) -> int:
        held = np.flatnonzero(self.phase)
        free = self.phase == FREE
        if self._ground is not None:
            free &= self._ground.open()
        choice = np.flatnonzero(free)
        if not held.size:
            return int(choice[0])
        first, last = int(held[0]), int(held[-1])
        inside = choice[(choice > first) & (choice < last)]
        if inside.size:
            return int(inside[0])
        below = choice[choice < first]
        return int(below[-1] if below.size else choice[0])

    def _vacate(self, slot: int) -> None:
        self.owners[slot] = None
        self.phase[slot] = FREE
        self.cached[slot] = self.length[slot] = 0
        self.adapters[slot] = NO_ADAPTER
        if self._ground is not None:
            self._ground.leave(slot)
