"""Keys and values in blocks, and the rotary tables of all slots, in memory that is allocated once."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch, blocks_of
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
    """Bytes of a cache of `blocks` blocks (0: `max_length` tokens for each slot), and of the slots' rotary tables and
    states."""
    block = block_bytes(architecture, COMPUTED_BYTES[computed(precision)], kv_precision)
    widths = sum(head_dim for rope, head_dim in _ropes(architecture) if has_own_tables(rope, max_length))
    tables = slots * max_length * widths * COMPUTED_BYTES["f32"]
    states = slots * state_numbers(architecture) * COMPUTED_BYTES["f32"]
    return (blocks or slots * blocks_of(max_length)) * block + tables + states


def state_numbers(architecture: Architecture) -> int:
    """Numbers, of f32, of the state that a text has beside its blocks; 0 where no layer has one."""
    deltas = (architecture.layer(index).delta for index in range(architecture.layers))
    return sum(delta.numbers for delta in deltas if delta is not None)


def block_bytes(architecture: Architecture, number_bytes: int, kv_precision: str) -> int:
    """Bytes of a block: the keys and values of its tokens in all layers. number_bytes: see `vector_bytes`."""
    return sum(
        2 * one.kv_heads * BLOCK_TOKENS * vector_bytes(one.head_dim, number_bytes, kv_precision)
        for one in (architecture.layer(index) for index in range(architecture.layers))
        if one.delta is None and one.kv_layer < 0
    )


class KeyValueCache:
    """keys and values of each layer: [blocks, kv_heads, BLOCK_TOKENS, head_dim], of `dtype` or, with scales, INT8.

    key_scales and value_scales of each layer: FLOAT32 [blocks, kv_heads, BLOCK_TOKENS]; none with a `kv_precision` of
    auto. A vector is its levels times its scale. A layer without attention has no head.

    A block is contiguous: `block_elements` elements. So is the part of a head in it: vectors, then their scales.

    memory: of `dtype`, flat; block after block, then `extra_elements` for other uses.
    tables: the rotary tables of each layer.
    states: of layers that have a state for each text; None: there is no such layer.
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
        self.states = States(architecture, slots, device) if state_numbers(architecture) else None

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def _lay_out(self, architecture: Architecture, kv_precision: str) -> None:
        """Give each layer its part of the blocks: the keys of all layers, then their values."""
        halves = self._block_memory.view(self.blocks, 2, -1)
        parts = [self.keys, self.values, *([self.key_scales, self.value_scales] if kv_precision == "int8" else [])]
        end = 0
        for layer in (architecture.layer(index) for index in range(architecture.layers)):
            if layer.delta is not None:
                nothing = self.memory.new_empty(self.blocks, 0, BLOCK_TOKENS, layer.head_dim)
                for part in parts:
                    part.append(nothing)
                continue
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


class States:
    """What layers of a delta net keep of each text, FLOAT32: of constant size, whatever the length of the text is.

    windows  by layer [slots, kernel, channels]: the inputs of the convolution at position p in place p % kernel
    states   by layer [slots, heads, key_dim, value_dim]

    A text begins with a state of zeros. What a state holds cannot be taken back, but its last token may be computed
    again: a token that could not be chosen yet is chosen by the logits of a second time.
    """

    def __init__(self, architecture: Architecture, slots: int, device: torch.device | str) -> None:
        memory = _zeros(slots * state_numbers(architecture), torch.float32, str(device))
        self.windows: dict[int, torch.Tensor] = {}
        self.states: dict[int, torch.Tensor] = {}
        end = 0
        for layer in range(architecture.layers):
            if (delta := architecture.layer(layer).delta) is None:
                continue
            for shape, tensors in (
                ((slots, delta.kernel, delta.channels), self.windows),
                ((slots, delta.heads, delta.key_dim, delta.value_dim), self.states),
            ):
                begin, end = end, end + math.prod(shape)
                tensors[layer] = memory[begin:end].view(shape)
        # Tokens of the text of each slot that its state holds.
        self._held = np.zeros(slots, np.int64)

    def advance(self, batch: StepBatch) -> torch.Tensor:
        """The states are about to hold the rows of `batch`.

        Returns INT32 [rows, 5]: the slot of each row, the position of its first token, the place of this token in the
        batch, the tokens, and whether the state holds the first one already. Raises InvalidInputError for a row that
        goes on from any other place than its state.
        """
        slots, starts, lengths = (one.numpy() for one in (batch.slots, batch.starts, batch.lengths))
        held = self._held[slots]
        replayed = (starts > 0) & (starts == held - 1)
        fits = (starts == 0) | (starts == held) | replayed
        require(bool(fits.all()), "starts", starts.tolist(), f"0, or where the states of the rows end: {held.tolist()}")
        self._held[slots] = starts + lengths
        firsts = np.cumsum(lengths) - lengths
        return torch.from_numpy(np.stack([slots, starts, firsts, lengths, replayed], axis=1).astype(np.int32))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `interfaces.Runtime.copy_states`."""
        for tensors in (*self.windows.values(), *self.states.values()):
            for source, target in zip(sources, targets, strict=True):
                tensors[target].copy_(tensors[source])
        self._held[targets] = self._held[sources]


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
