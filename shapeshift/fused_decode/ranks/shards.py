"""Which part of each tensor a rank reads: Megatron's column and row splits (Shoeybi et al., 2019, section 3).

A layer's first linears (queries, keys and values; the MLP's first) are split by outputs: a rank has whole heads. The
linears behind them are split by inputs, so that the sum of the ranks' outputs is the layer's. Embedding and norms are
whole on every rank. The output head is split by tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.tensor_layout import linears
from shapeshift.fused_decode.model.weights import WeightFiles

SUMMED = ("output", "down")
"""The linears of a layer whose outputs the ranks add."""


@dataclass(frozen=True)
class Part:
    """Ranges of places in one dimension of a tensor."""

    dimension: int
    ranges: tuple[tuple[int, int], ...]


class RankWeights(WeightFiles):
    """The part of a checkpoint that `rank` of `ranks` has. No byte of another rank's part is read.

    architecture: of the rank (see `Architecture.share`), with a head of its own.
    """

    def __init__(self, folder: Path, whole: Architecture, rank: int, ranks: int) -> None:
        """Raises InvalidInputError as WeightFiles and `Architecture.share` do."""
        super().__init__(folder, whole)
        self.architecture = replace(whole.share(ranks), tied=False)
        # From here on linears are those of the rank.
        self._architecture = self.architecture
        self._rank = rank
        self._parts = layer_parts(whole, rank, ranks)
        names = whole.tensors
        self._head = {f"{names.head}.{kind}" for kind in ("weight", "bias")}
        self._table = f"{names.embedding}.weight" if whole.tied else f"{names.head}.weight"
        self._head_rows = math.ceil(whole.vocab_size / ranks)
        self._layers = f"{names.layers}."

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of the tensor `name`, contiguous, as `dtype`; a copy. Equal parts of the head: the last one
        ends with zeros."""
        if name in self._head:
            first = self._rank * self._head_rows
            rows = self._slices(
                self._table if name.endswith("weight") else name, Part(0, ((first, first + self._head_rows),))
            )
            missing = self._head_rows - len(rows)
            tensor = functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
        else:
            inner = name.removeprefix(self._layers).partition(".")[2] if name.startswith(self._layers) else ""
            part = self._parts.get(inner)
            if part is None:
                return super().read(name, dtype)
            tensor = self._slices(name, part)
        return tensor.to(dtype, copy=True).contiguous()

    def linear(self, layer: int, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `WeightFiles.linear`. The bias of a sum is that of rank 0: it is added once."""
        weight, bias = super().linear(layer, name, dtype)
        return weight, None if name in SUMMED and self._rank else bias

    def _slices(self, name: str, part: Part) -> torch.Tensor:
        path, stored = self._places[name]
        with safe_open(str(path), framework="pt") as file:
            whole = file.get_slice(stored)
            pieces = [whole[first:end] if part.dimension == 0 else whole[:, first:end] for first, end in part.ranges]
        return torch.cat(pieces, dim=part.dimension)


def layer_parts(whole: Architecture, rank: int, ranks: int) -> dict[str, Part]:
    """The part of each split tensor of a layer, by its name within the layer; the other tensors are read whole."""
    names = whole.tensors
    outputs, inputs = (1, 0) if names.columns else (0, 1)
    parts: dict[str, Part] = {}
    for kind, linear in linears(whole).items():
        for name, count in zip(linear.names, linear.outputs, strict=True):
            if kind in SUMMED:
                parts[f"{name}.weight"] = Part(inputs, (_share(0, linear.inputs, rank, ranks),))
                continue
            ranges, first = [], 0
            for width in _stacked(whole, kind, count):
                ranges.append(_share(first, width, rank, ranks))
                first += width
            parts[f"{name}.weight"] = Part(outputs, tuple(ranges))
            parts[f"{name}.bias"] = Part(0, tuple(ranges))
    return parts


def _stacked(whole: Architecture, kind: str, count: int) -> tuple[int, ...]:
    """The widths of what one tensor of a linear holds one after another, each of which the ranks divide."""
    if kind == "qkv" and len(whole.tensors.qkv) == 1 and not whole.tensors.by_head:
        return whole.query_width, whole.kv_width, whole.kv_width
    if kind == "gate_up" and len(whole.tensors.gate_up) == 1 and whole.gated:
        return whole.intermediate, whole.intermediate
    return (count,)


def _share(first: int, width: int, rank: int, ranks: int) -> tuple[int, int]:
    """The range of `rank` in the `width` places from `first` on."""
    each = width // ranks
    return first + rank * each, first + (rank + 1) * each
