"""Keys and values of all slots, in memory that is allocated once."""

from __future__ import annotations

import math

import torch

from shapeshift.fused_decode.model.architecture import PRECISION_BYTES, Architecture
from shapeshift.settings import require


def cache_bytes(architecture: Architecture, slots: int, max_length: int, precision: str) -> int:
    """Bytes of the cache of `slots` slots of `max_length` tokens each."""
    elements = 2 * architecture.layers * slots * max_length * architecture.kv_width
    return elements * PRECISION_BYTES[precision]


class KeyValueCache:
    """keys and values: [layers, slots, kv_heads, max_length, head_dim] each.

    A slot is contiguous: `slot_elements` elements.

    memory: flat; slot after slot, then `extra_elements` for other uses.
    """

    def __init__(
        self,
        architecture: Architecture,
        slots: int,
        max_length: int,
        dtype: torch.dtype,
        *,
        device: str = "cpu",
        extra_elements: int = 0,
    ) -> None:
        require(slots >= 1, "slots", slots, "at least 1")
        limit = architecture.max_position
        require(1 <= max_length <= limit, "max_length", max_length, f"1 to max_position_embeddings ({limit})")
        self.slots = slots
        self.max_length = max_length
        shape = (slots, 2, architecture.layers, architecture.kv_heads, max_length, architecture.head_dim)
        self.slot_elements = math.prod(shape[1:])
        self.memory = torch.zeros(slots * self.slot_elements + extra_elements, dtype=dtype, device=device)
        both = self.memory[: slots * self.slot_elements].view(shape)
        self.keys, self.values = both[:, 0].transpose(0, 1), both[:, 1].transpose(0, 1)

    def clear(self, slot: int) -> None:
        """Set the keys and values of a slot to 0."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` over those of slot `target`.

        Raises InvalidInputError for a slot or a length outside the cache.
        """
        for field, slot in (("source", source), ("target", target)):
            require(0 <= slot < self.slots, field, slot, f"0 to {self.slots - 1}")
        require(0 <= length <= self.max_length, "length", length, f"0 to {self.max_length}")
        for buffer in (self.keys, self.values):
            buffer[:, target, :, :length] = buffer[:, source, :, :length]
