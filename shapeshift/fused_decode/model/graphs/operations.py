"""The operations of a step whose shapes depend on its bounds alone, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.operations import (
    AttentionLayer,
    TorchOperations,
    gather,
    mix,
    norm_heads,
    rotate,
    store,
    visible,
)


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


class GraphOperations(TorchOperations):
    """See `operations.Operations`, for a plan that is a tuple of FixedRows. It never waits for the device."""

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        # All are written before any is read: what fills the rows may be a token of the chunk.
        queries = [_write(qkv, layer, rows) for rows in plan]
        mixed = [_read(query, layer, rows) for query, rows in zip(queries, plan, strict=True)]
        return torch.cat(mixed).to(qkv.dtype)


def _write(qkv: torch.Tensor, layer: AttentionLayer, rows: FixedRows) -> torch.Tensor:
    """Write keys and values of rows into the cache; their queries [rows, heads, length, head_dim]."""
    kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    own = qkv[rows.first : rows.first + rows.positions.numel()]
    parts = own.float().view(*rows.positions.shape, -1, head_dim)
    query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], dim=2)
    slots = rows.slots[:, None]
    query = rotate(norm_heads(query, layer.query_norm, layer.eps), slots, rows.positions, layer)
    key = rotate(norm_heads(key, layer.key_norm, layer.eps), slots, rows.positions, layer)
    store(key, layer.keys, rows.blocks, rows.positions)
    store(value, layer.values, rows.blocks, rows.positions)
    return query.transpose(1, 2)


def _read(query: torch.Tensor, layer: AttentionLayer, rows: FixedRows) -> torch.Tensor:
    """Attention of the queries of rows over their texts, [tokens, heads head_dim]."""
    seen = visible(layer, rows.positions, rows.blocks.shape[1] * BLOCK_TOKENS)
    keys, values = (gather(cache, rows.blocks, seen) for cache in (layer.keys, layer.values))
    mixed = mix(query.to(keys.dtype), keys, values, seen[:, None], layer)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)
