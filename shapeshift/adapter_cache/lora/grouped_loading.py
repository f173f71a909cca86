"""The kernels of LoRA on a GPU, where they prove right there: they are held against plain torch; see `kernel_check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from shapeshift.adapter_cache.lora.batch import ALIGNMENT, FIELDS, PARTS
from shapeshift.adapter_cache.lora.grouped import GPU_KERNELS, AddTerms, GroupedLora, add_terms, tiles_of
from shapeshift.fused_decode.model.graphs import kernel_check
from shapeshift.serving.model_args import Log

_WIDTHS = ((256, (256, 128, 128)), (200, (96, 40, 170)))
"""Inputs, and outputs of each part: multiples of 16, for which a compiler has other code, and others."""
_TOKENS = 21


def load(most_ranks: int, memory: torch.Tensor, log: Log) -> GroupedLora | None:
    """The kernels for adapters of up to `most_ranks` in `memory`: of its GPU, as `verified`; on a CPU plain torch."""
    if not memory.is_cuda:
        return GroupedLora(add_terms, "grouped, torch", most_ranks)
    # torch for CUDA brings the package that they need.
    return verified(lambda: GPU_KERNELS["cuda"], most_ranks, memory, log)


def verified(kernels: Callable[[], AddTerms], most_ranks: int, memory: torch.Tensor, log: Log) -> GroupedLora | None:
    """The kernels, where they give on the device of `memory` what plain torch gives; else None, and the log says why.

    kernels: imports them
    """

    def errors() -> Iterator[float]:
        return (_error(kernels(), *widths, most_ranks, memory) for widths in _WIDTHS)

    with torch.inference_mode():
        is_right = kernel_check.are_right(errors, "LoRA in plain torch, and its steps without graphs", log)
    return GroupedLora(kernels(), "grouped, triton", most_ranks) if is_right else None


def _error(add: AddTerms, width: int, parts: tuple[int, ...], most_ranks: int, memory: torch.Tensor) -> float:
    """The largest difference for a step of one linear; see `kernel_check.difference`."""
    chance = torch.Generator().manual_seed(0)
    ranks = (most_ranks, 1, most_ranks // 2 + 1)
    places, start = torch.zeros(len(ranks), PARTS, FIELDS, dtype=torch.int64), 0
    for adapter, rank in enumerate(ranks):
        first = 0
        # The last adapter has no term of the first part.
        for part, outputs in enumerate(parts):
            if adapter < 2 or part:
                places[adapter, part] = torch.tensor([start, rank, first, outputs])
                start += -(-rank * (width + outputs) // ALIGNMENT) * ALIGNMENT
            first += outputs

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance).to(memory.device, memory.dtype)

    factors, inputs, before = drawn(start) / 4, drawn(_TOKENS, width), drawn(_TOKENS, sum(parts))
    # More tokens of one adapter than a tile has, tokens without one, and a tile without tokens.
    owners = np.where(np.arange(_TOKENS) < 18, 0, np.arange(_TOKENS) - 19)
    tiles = np.concatenate([tiles_of(owners), np.full_like(tiles_of(owners)[:1], -1)])
    arguments = places.to(memory.device), factors, torch.from_numpy(tiles).to(memory.device), most_ranks, inputs
    computed, expected = before.clone(), before.clone()
    add(*arguments, computed)
    add_terms(*arguments, expected)
    return kernel_check.difference(computed, expected)
