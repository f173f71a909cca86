"""The decode step's operations in plain torch, for machines without a compiler; the measure of the native ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from shapeshift.fused_decode.network import Network
from shapeshift.fused_decode.operations import AttentionLayer
from shapeshift.fused_decode.step import StepBatch


@dataclass(frozen=True)
class _Rows:
    """Rows of equal length, attended to together.

    tokens     INT64 [rows, length]  places in the batch
    positions  INT64 [rows, length]  places in the slot
    slots      INT64 [rows]
    context    tokens in the longest of these slots after this step
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    context: int


class TorchOperations:
    """See `operations.Operations`."""

    name = "torch"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device

    def plan(self, batch: StepBatch, kv_heads: int, group: int) -> list[_Rows]:
        lengths, starts = batch.lengths.long(), batch.starts.long()
        firsts = lengths.cumsum(0) - lengths
        found = []
        for length in sorted(set(lengths.tolist())):
            rows = (lengths == length).nonzero()[:, 0]
            steps = torch.arange(length)
            positions = starts[rows, None] + steps
            context = int(positions.max()) + 1
            tokens, slots = firsts[rows, None] + steps, batch.slots[rows].long()
            tokens, positions, slots = (place.to(self._device) for place in (tokens, positions, slots))
            found.append(_Rows(tokens, positions, slots, context))
        return found

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        out = qkv.new_empty(qkv.shape[0], heads * head_dim)
        for rows in plan:
            parts = qkv[rows.tokens].float().view(*rows.tokens.shape, -1, head_dim)
            query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], dim=2)
            query = rotate(norm_heads(query, layer.query_norm, layer.eps), rows.positions, layer)
            key = rotate(norm_heads(key, layer.key_norm, layer.eps), rows.positions, layer)
            layer.keys[rows.slots[:, None], :, rows.positions] = key.to(layer.keys.dtype)
            layer.values[rows.slots[:, None], :, rows.positions] = value.to(layer.values.dtype)
            mixed = _attend(query.transpose(1, 2), layer, rows)
            out[rows.tokens] = mixed.transpose(1, 2).flatten(2).to(out.dtype)
        return out

    def add_norm(
        self, state: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        if delta is not None:
            state += delta
        return functional.rms_norm(state, weight.shape, weight, eps).to(dtype)

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(both.dtype)

    def whole(self, network: Network) -> None:
        return None


def norm_heads(vectors: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm of each head's vector, [..., head_dim], where there is a weight."""
    return vectors if weight is None else functional.rms_norm(vectors, weight.shape, weight, eps)


def rotate(vectors: torch.Tensor, positions: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Vectors [rows, length, heads, head_dim] turned to their positions, INT64 [rows, length]."""
    cosines, sines = layer.cosines[positions][:, :, None], layer.sines[positions][:, :, None]
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _attend(query: torch.Tensor, layer: AttentionLayer, rows: _Rows) -> torch.Tensor:
    """Queries [rows, heads, length, head_dim] over their slots' keys and values."""
    places = torch.arange(rows.context, device=query.device)
    seen = places <= rows.positions[:, :, None]
    if layer.window:
        seen &= places > rows.positions[:, :, None] - layer.window
    keys, values = (cache[rows.slots, :, : rows.context].float() for cache in (layer.keys, layer.values))
    # What lies beyond a row's own tokens may be anything, and 0 times that is not always 0.
    values.masked_fill_(~seen.any(dim=1)[:, None, :, None], 0.0)
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None], enable_gqa=True)
