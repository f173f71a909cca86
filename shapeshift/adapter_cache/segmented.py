"""Terms adapter by adapter in plain torch: the measure of the native kernel, and what stands in for it elsewhere."""

from __future__ import annotations

import torch

from shapeshift.adapter_cache.terms import Loaded
from shapeshift.fused_decode.adjust import Groups

Pair = tuple[torch.Tensor, torch.Tensor, slice]


def factors(loaded: Loaded, adapter: int, layer: int, linear: int, inputs: int) -> list[Pair]:
    """The terms of one adapter in a layer's linear: A [rank, inputs], B [rank, outputs], and the outputs' columns."""
    found = []
    for offset, rank, first, outputs in loaded.places[adapter, layer, linear].tolist():
        if rank:
            a = loaded.memory[offset : offset + rank * inputs].view(rank, inputs)
            b = loaded.memory[offset + rank * inputs : offset + rank * (inputs + outputs)].view(rank, outputs)
            found.append((a, b, slice(first, first + outputs)))
    return found


class SegmentedTerms:
    """See `terms.Prepared`. Arithmetic in f32."""

    plain = None

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def add(self, groups: Groups, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        for adapter, tokens in enumerate(groups.each()):
            if not len(tokens):
                continue
            places = tokens.to(inputs.device)
            rows = inputs[places].float()
            for a, b, columns in factors(self._loaded, adapter, layer, linear, inputs.shape[1]):
                term = (rows @ a.float().T) @ b.float()
                outputs[places, columns] = (outputs[places, columns].float() + term).to(outputs.dtype)


class Segmented:
    """See `terms.Form`."""

    name = "segmented, torch"

    def prepare(self, loaded: Loaded) -> SegmentedTerms:
        return SegmentedTerms(loaded)
