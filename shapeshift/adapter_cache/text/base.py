"""The base model of adapters over an encoder, as its engines describe it; what a pack of texts needs of adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shapeshift.adapter_cache.lora.batch import Adaptable, Part, group_tokens
from shapeshift.adapter_cache.memory.adapter_table import Adapter
from shapeshift.adapter_cache.registry.peft import BaseModel
from shapeshift.engines.execution.request import Row
from shapeshift.engines.interfaces import Adapted
from shapeshift.engines.native import encoder
from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.interfaces import LowRank


def base_model(engines: Path, names: Collection[str], max_rank: int, checkpoint: Path, sha256: str = "") -> BaseModel:
    """See `BaseModel`; engines: the folder of the engines of provider native. Raises UnsupportedError for families
    that take none."""
    described = encoder.description(engines)
    adaptable = described["adaptable"]
    if adaptable is None:
        raise UnsupportedError("adapter_mb: no adapters over DeBERTa, or over ALBERT, whose layers share weights")
    return BaseModel(_adaptable(adaptable), names, max_rank, checkpoint, sha256, head=encoder.head(engines, described))


def _adaptable(described: Mapping[str, Any]) -> Adaptable:
    targets = described["targets"]
    return Adaptable(
        described["layers"],
        tuple(described["paths"]),
        {one["name"]: (one["linear"], one["part"]) for one in targets},
        {(one["linear"], one["part"]): Part(one["inputs"], one["first"], one["outputs"]) for one in targets},
        {name: tuple(shape) for name, shape in described["head"].items()},
        tuple(described["unused"]),
    )


class PackAdapters:
    """Makes of the adapters in `memory` what an engine needs for a pack. Any thread calls it."""

    def __init__(self, memory: torch.Tensor, head: Sequence[torch.Tensor]) -> None:
        """head: the base model's."""
        self._memory, self._head = memory, head

    def __call__(self, rows: Sequence[Row]) -> Adapted | None:
        """None where no row has an adapter."""
        # One whose request has ended may leave the memory at any time, so that its places are read once; nobody reads
        # what is computed for it.
        named = dict.fromkeys(row.request.adapter for row in rows if row.request.adapter is not None)
        present = {adapter: places for adapter in named if (places := adapter.places) is not None}
        if not present:
            return None
        numbers = {adapter: number for number, adapter in enumerate(present)}
        of_rows = np.array([numbers.get(row.request.adapter, -1) for row in rows])
        groups = group_tokens(np.repeat(of_rows, [row.tokens for row in rows]), len(present))
        places = torch.stack([*present.values()])
        heads = [
            (np.flatnonzero(of_rows == number), self._head_of(adapter))
            for adapter, number in numbers.items()
            if adapter.head
        ]
        return Adapted(LowRank(self._memory, places, groups, groups).arrays(), heads)

    def _head_of(self, adapter: Adapter) -> Sequence[torch.Tensor]:
        tensors, start = list(self._head), adapter.start
        for tensor, place in zip(adapter.source.head, adapter.head, strict=True):
            values = self._memory[start + place.start : start + place.stop].view(torch.float32)
            tensors[tensor.index] = values.view(tensor.shape)
        return tensors
