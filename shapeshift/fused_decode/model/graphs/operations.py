"""The operations of a step whose shapes depend on its bounds alone, and their attention in plain torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.network import AttentionLayer
from shapeshift.fused_decode.model.torch_operations import (
    TorchOperations,
    add_norm,
    gate,
    gather,
    mix,
    norm_heads,
    rotate,
    store,
    visible,
)
from shapeshift.settings import Choices


@dataclass(frozen=True)
class FixedRows:
    """Rows of equal length, which lie side by side in the batch from token `first` on.

    positions  INT64 [rows, length]
    slots      INT64 [rows]
    blocks     INT64 [rows, n]  those of each text
    """

    first: int
    positions: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor

    @property
    def tokens(self) -> slice:
        """The places of their tokens in the batch."""
        return slice(self.first, self.first + self.positions.numel())


@dataclass(frozen=True)
class StepKernels:
    """What a step computes beside its linears. None of it waits for the device.

    name   for the log
    write  write(qkv, layer, rows): normalise and rotate queries and keys of `qkv`, the tokens of the rows [tokens,
           (heads + 2 kv_heads) head_dim], and write keys and values into the cache. Returns the queries as `read` wants
           them
    read   read(queries, layer, rows, mixed): the attention of these queries over their texts, to `mixed` [tokens, heads
           head_dim]
    add_norm, gate  see `network.Operations`
    """

    name: str
    write: Callable[[torch.Tensor, AttentionLayer, FixedRows], torch.Tensor]
    read: Callable[[torch.Tensor, AttentionLayer, FixedRows, torch.Tensor], None]
    add_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float, torch.dtype], torch.Tensor]
    gate: Callable[[torch.Tensor], torch.Tensor]


class _KernelOperations(TorchOperations):
    """See `network.Operations`. It never waits for the device."""

    def __init__(self, device: torch.device | str, kernels: StepKernels) -> None:
        super().__init__(device)
        self._kernels = kernels

    def add_norm(
        self, state: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._kernels.add_norm(state, delta, weight, eps, dtype)

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        return self._kernels.gate(both)


class GraphOperations(_KernelOperations):
    """For a plan that is a tuple of FixedRows."""

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        mixed = _unmixed(qkv, layer)
        # All are written before any is read: what fills the rows may be a token of the chunk.
        queries = [self._kernels.write(qkv[rows.tokens], layer, rows) for rows in plan]
        for query, rows in zip(queries, plan, strict=True):
            self._kernels.read(query, layer, rows, mixed[rows.tokens])
        return mixed


class RowOperations(_KernelOperations):
    """For any step: rows of one length at a time."""

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        mixed = _unmixed(qkv, layer)
        for group in plan:
            rows, tokens = FixedRows(0, group.positions, group.slots, group.blocks), group.tokens.flatten()
            out = mixed[tokens]
            self._kernels.read(self._kernels.write(qkv[tokens], layer, rows), layer, rows, out)
            mixed[tokens] = out
        return mixed


def _unmixed(qkv: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Memory for the attention of all these tokens, [tokens, heads head_dim]."""
    _, kv_heads, _, head_dim = layer.keys.shape
    return qkv.new_empty(len(qkv), qkv.shape[1] - 2 * kv_heads * head_dim)


def _write(qkv: torch.Tensor, layer: AttentionLayer, rows: FixedRows) -> torch.Tensor:
    """See `StepKernels.write`; queries [rows, heads, length, head_dim]."""
    kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    parts = qkv.float().view(*rows.positions.shape, -1, head_dim)
    query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], dim=2)
    slots = rows.slots[:, None]
    query = rotate(norm_heads(query, layer.query_norm, layer.eps), slots, rows.positions, layer)
    key = rotate(norm_heads(key, layer.key_norm, layer.eps), slots, rows.positions, layer)
    store(key, layer.keys, rows.blocks, rows.positions)
    store(value, layer.values, rows.blocks, rows.positions)
    return query.transpose(1, 2)


def _read(query: torch.Tensor, layer: AttentionLayer, rows: FixedRows, mixed: torch.Tensor) -> None:
    """See `StepKernels.read`: over a copy of the keys and values of all places."""
    seen = visible(layer, rows.positions, rows.blocks.shape[1] * BLOCK_TOKENS)
    keys, values = (gather(cache, rows.blocks, seen) for cache in (layer.keys, layer.values))
    heads = mix(query.to(keys.dtype), keys, values, seen[:, None], layer)
    mixed.copy_(heads.transpose(1, 2).flatten(2).flatten(0, 1))


GATHERED = StepKernels("torch", _write, _read, add_norm, gate)
GPU_KERNELS: Choices[StepKernels] = Choices(
    "decode_kernels", {"cuda": "shapeshift.fused_decode.model.graphs.gpu_kernels:KERNELS"}
)


def has_gpu_kernels() -> bool:
    """Whether the package is installed in whose language `gpu_kernels` are: torch for CUDA brings it."""
    return importlib.util.find_spec("triton") is not None


def eager_operations(device: torch.device, kernels: StepKernels) -> TorchOperations:
    """The operations of steps without a graph."""
    return TorchOperations(device) if kernels is GATHERED else RowOperations(device, kernels)


def step_kernels(on_gpu: bool) -> StepKernels:
    """The kernels of a GPU; on a CPU, and without the package that they need, plain torch."""
    return GPU_KERNELS["cuda"] if on_gpu and has_gpu_kernels() else GATHERED
