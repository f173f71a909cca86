"""Keys and values in blocks, and the rotary tables of all slots, in memory that is allocated once."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, blocks_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.parts import Rope
from shapeshift.fused_decode.settings import COMPUTED_BYTES, computed, vector_bytes
from shapeshift.settings import Choices, require

Scaling = Callable[[Rope, torch.Tensor, int], torch.Tensor]
_ROPE = "shapeshift.fused_decode.model.rope"
SCALINGS: Choices[Scaling] = Choices(
    "rope_type",
    {
        kind: f"{_ROPE}:{kind}"
        for kind in ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
    },
)
# Without positions no element rotates.
_STILL = Rope()


def cache_bytes(
    architecture: Architecture,
    slots: int,
    max_length: int,
    precision: str,
    blocks: int = 0,
    kv_precision: str = "auto",
) -> int:
    """Bytes of a cache of `blocks` blocks (0: `max_length` tokens for each slot), and of the slots' rotary tables."""
    block = block_bytes(architecture, COMPUTED_BYTES[computed(precision)], kv_precision)
    widths = sum(head_dim for rope, head_dim in _ropes(architecture) if has_own_tables(rope, max_length))
    tables = slots * max_length * widths * COMPUTED_BYTES["f32"]
    return (blocks or slots * blocks_of(max_length)) * block + tables


def block_bytes(architecture: Architecture, number_bytes: int, kv_precision: str) -> int:
    """Bytes of a block: the keys and values of its tokens in all layers. number_bytes: see `vector_bytes`."""
    return sum(
        2 * one.kv_heads * BLOCK_TOKENS * vector_bytes(one.head_dim, number_bytes, kv_precision)
        for one in (architecture.layer(index) for index in range(architecture.layers))
        if one.kv_layer < 0
    )


class KeyValueCache:
    """keys and values of each layer: [blocks, kv_heads, BLOCK_TOKENS, head_dim], of `dtype` or, with scales, INT8.

    key_scales and value_scales of each layer: FLOAT32 [blocks, kv_heads, BLOCK_TOKENS]; none with a `kv_precision` of
    auto. A vector is its levels times its scale.

    A block is contiguous: `block_elements` elements. So is the part of a head in it: vectors, then their scales.

    memory: of `dtype`, flat; block after block, then `extra_elements` for other uses.
    tables: the rotary tables of each layer.
    """

    def __init__(
        self,
        architecture: Architecture,
        slots: int,
        max_length: int,
        dtype: torch.dtype,
        *,
        blocks: int = 0,
        kv_precision: str = "auto",
        device: str = "cpu",
        extra_elements: int = 0,
    ) -> None:
        """blocks: 0: of `max_length` tokens for each slot. kv_precision: one of `settings.KV_PRECISIONS`."""
        require(slots >= 1, "slots", slots, "at least 1")
        limit = architecture.max_position
        require(1 <= max_length <= limit, "max_length", max_length, f"1 to max_position_embeddings ({limit})")
        self.slots = slots
        self.max_length = max_length
        self.text_blocks = blocks_of(max_length)
        self.blocks = blocks or slots * self.text_blocks
        self.block_elements = block_bytes(architecture, dtype.itemsize, kv_precision) // dtype.itemsize
        self.memory = _zeros(self.blocks * self.block_elements + extra_elements, dtype, device)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.key_scales: list[torch.Tensor] = []
        self.value_scales: list[torch.Tensor] = []
        self._lay_out(architecture, kv_precision)
        tables = {
            (rope, head_dim): RopeTables(rope, head_dim, slots, max_length, device)
            for rope, head_dim in _ropes(architecture)
        }
        self.tables = [tables[_rope(architecture, layer)] for layer in range(architecture.layers)]
        self._own_tables = [one for one in tables.values() if one.is_own]

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def _lay_out(self, architecture: Architecture, kv_precision: str) -> None:
        """Give each layer its part of the blocks: the keys of all layers, then their values."""
        halves = self._block_memory.view(self.blocks, 2, -1)
        end = 0
        for layer in (architecture.layer(index) for index in range(architecture.layers)):
            if layer.kv_layer >= 0:
                for each in (self.keys, self.values, self.key_scales, self.value_scales):
                    each += each[layer.kv_layer : layer.kv_layer + 1]
                continue
            size = block_bytes(replace(layer, layers=1), halves.dtype.itemsize, kv_precision) // halves.dtype.itemsize
            begin, end = end, end + size // 2
            heads = halves[..., begin:end].view(self.blocks, 2, layer.kv_heads, -1)
            if kv_precision == "int8":
                heads, levels = heads.view(torch.int8), BLOCK_TOKENS * layer.head_dim
                scales = heads[..., levels:].view(torch.float32)
                self.key_scales.append(scales[:, 0])
                self.value_scales.append(scales[:, 1])
                heads = heads[..., :levels]
            vectors = heads.view(*heads.shape[:-1], BLOCK_TOKENS, layer.head_dim)
            self.keys.append(vectors[:, 0])
            self.values.append(vectors[:, 1])

    @property
    def has_own_tables(self) -> bool:
        """Whether a slot's rotary tables depend on its text, so that `begin` must be called for each."""
        return bool(self._own_tables)

    def begin(self, slot: int, length: int) -> None:
        """A text of at most `length` tokens begins in `slot`."""
        for one in self._own_tables:
            one.begin(slot, length)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `interfaces.Runtime.copy_blocks`."""
        blocks = self._block_memory.view(self.blocks, -1)
        # One at a time: together, they would be copied twice.
        for source, target in zip(sources, targets, strict=True):
            blocks[target].copy_(blocks[source])

    @property
    def _block_memory(self) -> torch.Tensor:
        return self.memory[: self.blocks * self.block_elements]

    def own_blocks(self, slots: torch.Tensor) -> torch.Tensor:
        """The blocks of these slots, INT32 [n, text_blocks], where each slot has blocks of its own."""
        return slots[:, None] * self.text_blocks + torch.arange(self.text_blocks, dtype=torch.int32)


def _zeros(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros [count]; on a CPU in huge pages, where there are some.

    The blocks of a text lie far apart. With small pages, finding each of them costs a read of memory of its own.
    """
    if device != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype, device=device)
    held = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses.
    with contextlib.suppress(OSError):
        held.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(held, dtype=dtype, count=count)


class RopeTables:
    """Cosines and sines, FLOAT32 [slots, length, head_dim / 2] each, by slot and position.

    Element i of a head rotates with element i + head_dim / 2. The slots share one table, unless the frequencies of a
    text depend on its length and some texts are longer than those of the training.
    """

    def __init__(self, rope: Rope, head_dim: int, slots: int, length: int, device: torch.device | str = "cpu") -> None:
        self._rope, self._head_dim = rope, head_dim
        self.is_own = has_own_tables(rope, length)
        self._lengths = [0] * slots
        cosines, sines = (table.to(device) for table in self._table(1, length))
        if self.is_own:
            self.cosines, self.sines = (table.repeat(slots, 1, 1) for table in (cosines, sines))
        else:
            self.cosines, self.sines = (table.expand(slots, -1, -1) for table in (cosines, sines))

    def begin(self, slot: int, length: int) -> None:
        """A text of at most `length` tokens begins in `slot`, which has tables of its own."""
        length = max(length, self._rope.original)
        if self._lengths[slot] != length:
            self._lengths[slot] = length
            cosines, sines = self._table(length, self.cosines.shape[1])
            self.cosines[slot], self.sines[slot] = cosines, sines

    def _table(self, text: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of `length` positions, for texts of at most `text` tokens."""
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies(self._rope, self._head_dim, text)
        turning = angles.new_full((self._head_dim // 2,), self._rope.amplitude)
        # What does not rotate keeps its values.
        turning[self._rope.rotated // 2 :] = 1.0
        return angles.cos() * turning, angles.sin() * turning


def frequencies(rope: Rope, head_dim: int, length: int) -> torch.Tensor:
    """Radians per position of each pair of a head, FLOAT32 [head_dim / 2], for texts of at most `length` tokens.

    Pairs that do not rotate come last and have 0.
    """
    exponents = torch.arange(0, rope.rotated, 2, dtype=torch.float32) / max(rope.rotated, 1)
    scaled = SCALINGS[rope.kind](rope, 1.0 / rope.theta**exponents, length)
    return torch.cat([scaled, torch.zeros(head_dim // 2 - rope.rotated // 2)])


def has_own_tables(rope: Rope, max_length: int) -> bool:
    """Whether each slot has rotary tables: the frequencies of a text depend on its length, which may be so long."""
    return rope.by_length and max_length > rope.original


def _ropes(architecture: Architecture) -> set[tuple[Rope, int]]:
    return {_rope(architecture, layer) for layer in range(architecture.layers)}


def _rope(architecture: Architecture, layer: int) -> tuple[Rope, int]:
    """The rotary positions of a layer, and the size of the heads that they rotate."""
    return architecture.ropes[layer] or _STILL, architecture.layer(layer).head_dim
