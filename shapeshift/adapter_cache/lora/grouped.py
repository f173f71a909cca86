"""LoRA on a GPU: tokens in tiles of one adapter each, at fixed addresses, so that CUDA graphs hold the terms.

`gpu_kernels` computes them on a GPU, `add_terms` here in plain torch on a CPU. Which adapters a step has, their ranks
and where they lie are data: a graph serves any of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.adapter_cache.lora.batch import FIELDS, PARTS, RANK, BatchAdapters, LoraHook
from shapeshift.adapter_cache.lora.segmented import TorchLora
from shapeshift.fused_decode.interfaces import LINEARS, Groups, LinearDelta, LowRank, StepBatch
from shapeshift.settings import Choices

Numbers = npt.NDArray[np.int64]

TILE = 16
"""Most tokens of a tile: the least that a GPU multiplies at once."""
TILE_FIELDS = 1 + TILE
"""Of a tile, INT32: the index of its adapter, -1 for none; its tokens, -1 for none."""

AddTerms = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor], None]
"""add_terms(places, memory, tiles, most_ranks, inputs, outputs): add low-rank terms to `outputs` [tokens, width].

places      INT64 [adapters, PARTS, FIELDS], see `fused_decode.interfaces.LowRank`: those of one linear, any stride
memory      flat; holds the factors
tiles       INT32 [tiles, TILE_FIELDS]; no token is in two
most_ranks  at least the rank of every adapter
inputs      [tokens, inputs]
"""

GPU_KERNELS: Choices[AddTerms] = Choices(
    "lora_kernels", {"cuda": "shapeshift.adapter_cache.lora.gpu_kernels:add_terms"}
)


def add_terms(
    places: torch.Tensor,
    memory: torch.Tensor,
    tiles: torch.Tensor,
    most_ranks: int,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
) -> None:
    """See `AddTerms`: in plain torch, in f32."""
    width = inputs.shape[1]
    for adapter, *tokens in tiles.tolist():
        if adapter < 0:
            continue
        rows = torch.tensor([token for token in tokens if token >= 0], device=inputs.device)
        for offset, rank, first, count in places[adapter].tolist():
            if rank:
                middle, end = offset + rank * width, offset + rank * (width + count)
                a, b = memory[offset:middle].view(rank, width), memory[middle:end].view(rank, count)
                term = (inputs[rows].float() @ a.float().T) @ b.float()
                columns = slice(first, first + count)
                outputs[rows, columns] = (outputs[rows, columns].float() + term).to(outputs.dtype)


def tiles_of(adapters: Numbers, first: int = 0) -> npt.NDArray[np.int32]:
    """The tiles of tokens `first`, `first` + 1, ... with these adapters, -1 for none: INT32 [n, TILE_FIELDS].

    There are at most as many as tokens, and at most one in TILE tokens more than adapters.
    """
    order = np.argsort(adapters, kind="stable")
    order = order[np.searchsorted(adapters[order], 0) :]
    owners = adapters[order]
    place = np.arange(len(owners)) - np.searchsorted(owners, owners)
    tile = np.cumsum(place % TILE == 0) - 1
    tiles = np.full((int(tile[-1]) + 1 if len(owners) else 0, TILE_FIELDS), -1, np.int32)
    tiles[tile, 0] = owners
    tiles[tile, 1 + place % TILE] = order + first
    return tiles


class GroupedLora:
    """See `batch.LoraKernels`: `add` computes the terms of all adapters of a step at once."""

    fits_graphs = True

    def __init__(self, add: AddTerms, name: str, most_ranks: int) -> None:
        """most_ranks: the highest rank of an adapter."""
        self.name = name
        self.add = add
        self.most_ranks = most_ranks
        self.store = TorchLora().store

    def prepare(self, adapters: BatchAdapters) -> GroupedAdapters:
        return GroupedAdapters(adapters, self)


class GroupedAdapters:
    """See `batch.PreparedAdapters`: for steps without a graph."""

    arrays = None

    def __init__(self, adapters: BatchAdapters, kernels: GroupedLora) -> None:
        self._memory = adapters.memory
        self._places = adapters.places.to(adapters.memory.device)
        self._kernels = kernels
        self._tiles: tuple[Groups, torch.Tensor] | None = None

    def add(self, groups: Groups, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if self._tiles is None or self._tiles[0] is not groups:
            owners = np.full(groups.tokens, -1)
            counts = np.diff(groups.firsts.numpy())
            owners[groups.order.numpy()] = np.repeat(np.arange(len(counts)), counts)
            self._tiles = groups, torch.from_numpy(tiles_of(owners)).to(self._memory.device)
        if len(self._tiles[1]):
            ranks = self._kernels.most_ranks
            self._kernels.add(self._places[:, layer, linear], self._memory, self._tiles[1], ranks, inputs, outputs)


class GraphLoraHook(LoraHook):
    """See `fused_decode.interfaces.GraphHook`.

    table: INT64 [slots, layers, LINEARS, PARTS, FIELDS] on the device: the places of the adapters of the last step that
    `linears` was asked about, in the order of their numbers.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        places_of: Callable[[list[int]], tuple[list[torch.Tensor], int]],
        kernels: GroupedLora,
        has_magnitudes: Callable[[int], bool] = lambda number: False,
        *,
        slots: int,
        layers: int,
    ) -> None:
        """slots: most adapters of a step."""
        super().__init__(memory, places_of, kernels, has_magnitudes)
        self.memory = memory
        self.kernels = kernels
        self.table = torch.zeros(slots, layers, LINEARS, PARTS, FIELDS, dtype=torch.int64, device=memory.device)
        self._in_table: tuple[list[int], int] | None = None
        self._linears = 0

    def linears(self, batch: StepBatch) -> int:
        """See `GraphHook.linears`. 0 with a DoRA, which scales outputs too."""
        assert batch.adapters is not None
        numbers = np.unique(batch.adapters.numpy())
        present: list[int] = numbers[numbers >= 0].tolist()
        if any(map(self._has_magnitudes, present)):
            return 0
        places, version = self._places_of(present)
        if self._in_table != (present, version):
            self._in_table = present, version
            stacked = torch.stack(places)
            has_terms = (stacked[..., RANK] > 0).amax(dim=(0, 1, 3))
            self._linears = sum(1 << linear for linear in has_terms.nonzero()[:, 0].tolist())
            # Behind the steps that were launched before, which may read the places of others.
            stacked = stacked.pin_memory() if self.table.is_cuda else stacked
            self.table[: len(stacked)].copy_(stacked, non_blocking=True)
        return self._linears

    def fixed_terms(self, rows: int, chunk: int, linears: int) -> FixedLora:
        """See `GraphHook.fixed_terms`."""
        return FixedLora(self, rows, chunk, linears)

    def indices(self, adapters: torch.Tensor) -> Numbers:
        """The index in the table of each of these, -1 for none; they are of the last step."""
        assert self._in_table is not None
        numbers = adapters.numpy()
        return np.where(numbers < 0, -1, np.searchsorted(self._in_table[0], numbers))


class FixedLora:
    """See `fused_decode.interfaces.FixedTerms`."""

    def __init__(self, hook: GraphLoraHook, rows: int, chunk: int, linears: int) -> None:
        self._hook = hook
        self._rows = rows
        self._chunk = chunk
        # Each row may have an adapter of its own, a chunk has one.
        self._all = FixedTiles(rows + -(-chunk // TILE), hook.table.device)
        self._last = FixedTiles(rows + 1, hook.table.device) if chunk else self._all
        self.delta = FixedDelta(hook, self._all, self._last, linears)

    def fill(self, batch: StepBatch) -> None:
        """See `FixedTerms.fill`."""
        assert batch.adapters is not None
        indices = self._hook.indices(batch.adapters)
        # What fills the rows repeats the first one or, where there is none, the chunk.
        rows = np.full(self._rows, indices[0])
        singles = indices[: len(indices) - bool(self._chunk)]
        rows[: len(singles)] = singles
        tiles = tiles_of(rows)
        if not self._chunk:
            self._all.fill(tiles)
            return
        self._all.fill(np.concatenate([tiles, tiles_of(np.full(self._chunk, indices[-1]), self._rows)]))
        self._last.fill(np.concatenate([tiles, tiles_of(indices[-1:], self._rows)]))


class FixedTiles:
    """`count` tiles at a fixed address: `on_device`, INT32 [count, TILE_FIELDS]."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._host = torch.full((count, TILE_FIELDS), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.on_device = self._host.to(device, copy=True)

    def fill(self, tiles: npt.NDArray[np.int32]) -> None:
        """Write these tiles, INT32 [n, TILE_FIELDS]; the last copy of `on_device` has been made."""
        self._host[: len(tiles)] = torch.from_numpy(tiles)
        self._host[len(tiles) :] = -1
        self.on_device.copy_(self._host, non_blocking=True)


class FixedDelta:
    """See `fused_decode.interfaces.LinearDelta`, over the tiles of all tokens, and those of the last ones."""

    def __init__(self, hook: GraphLoraHook, tiles: FixedTiles, last: FixedTiles, linears: int) -> None:
        self._hook = hook
        self._tiles = tiles
        self._last = last
        self._linears = linears

    def add(self, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if self._linears >> linear & 1:
            hook, kernels = self._hook, self._hook.kernels
            tiles, places = self._tiles.on_device, hook.table[:, layer, linear]
            kernels.add(places, hook.memory, tiles, kernels.most_ranks, inputs, outputs)

    def subset(self, tokens: torch.Tensor) -> LinearDelta:
        """Of the last tokens, whatever `tokens` says: a graph has no others."""
        return FixedDelta(self._hook, self._last, self._last, self._linears)

    def low_rank(self, last: torch.Tensor) -> LowRank | None:
        return None
