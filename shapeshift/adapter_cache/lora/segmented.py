"""LoRA in plain torch, adapter by adapter: the reference of the native kernels, and the fallback without a compiler."""

from __future__ import annotations

import torch

from shapeshift.adapter_cache.lora.batch import BatchAdapters
from shapeshift.fused_decode.interfaces import Groups

_SERIAL = 16384
"""Elements that torch computes on the calling thread alone."""


class TorchLora:
    """See `batch.LoraKernels`. Arithmetic in f32."""

    name = "segmented, torch"
    fits_graphs = False

    def prepare(self, adapters: BatchAdapters) -> SegmentedAdapters:
        return SegmentedAdapters(adapters)

    def store(self, target: torch.Tensor, source: torch.Tensor, transposed: bool, scale: float) -> bool:
        rows, columns = source.shape
        shaped = target.view(columns, rows).T if transposed else target.view(rows, columns)
        finite = True
        step = max(1, _SERIAL // columns)
        for row in range(0, rows, step):
            piece = source[row : row + step].float() * scale
            finite = finite and bool(torch.isfinite(piece).all())
            shaped[row : row + step] = piece.to(target.dtype)
        return finite


class SegmentedAdapters:
    """See `batch.PreparedAdapters`."""

    arrays = None

    def __init__(self, adapters: BatchAdapters) -> None:
        self._adapters = adapters

    def add(self, groups: Groups, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        for adapter, tokens in enumerate(groups.each()):
            if not len(tokens):
                continue
            tokens = tokens.to(inputs.device)
            rows = inputs[tokens].float()
            for a, b, columns in _factors(self._adapters, adapter, layer, linear, inputs.shape[1]):
                term = (rows @ a.float().T) @ b.float()
                outputs[tokens, columns] = (outputs[tokens, columns].float() + term).to(outputs.dtype)


def _factors(
    adapters: BatchAdapters, adapter: int, layer: int, linear: int, inputs: int
) -> list[tuple[torch.Tensor, torch.Tensor, slice]]:
    """The terms of one adapter in one linear: A [rank, inputs], B [rank, outputs], and the columns of the outputs."""
    groups = []
    for offset, rank, first, outputs in adapters.places[adapter, layer, linear].tolist():
        if rank:
            a = adapters.memory[offset : offset + rank * inputs].view(rank, inputs)
            b = adapters.memory[offset + rank * inputs : offset + rank * (inputs + outputs)].view(rank, outputs)
            groups.append((a, b, slice(first, first + outputs)))
    return groups
