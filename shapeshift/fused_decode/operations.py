"""What a decode step computes beside its linears, as one protocol: native on CPUs, plain torch everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shapeshift.fused_decode.adjust import LowRank
from shapeshift.fused_decode.step import StepBatch

if TYPE_CHECKING:
    from shapeshift.fused_decode.network import Network

Pass = Callable[[torch.Tensor, Any, torch.Tensor, LowRank | None], torch.Tensor]
"""From tokens, plan and last tokens, as `network.Network.compute` has them, and what is added to the linears, to
logits that are valid until the next call."""


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's share of attention.

    keys, values          the cache, f32 or bf16 [slots, kv_heads, max_length, head_dim]
    cosines, sines        FLOAT32 [max_length or more, head_dim / 2], see `rope.tables`
    query_norm, key_norm  FLOAT32 [head_dim], RMS norm of each head's vector, where the family has it
    window                how many of the latest tokens each token attends to, its own included; 0: all
    """

    keys: torch.Tensor
    values: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    eps: float
    window: int


class Operations(Protocol):
    """Kernels over contiguous tensors; arithmetic in f32 whatever the storage type."""

    name: str

    def plan(self, batch: StepBatch, kv_heads: int, group: int) -> Any:
        """What `attention` needs to know of a batch, the same for every layer of one step.

        `group` is the number of query heads that share a key-value head.
        """
        ...

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache, attend causally.

        `qkv` is [tokens, (heads + 2 kv_heads) head_dim]: queries, keys, values. Returns [tokens, heads head_dim].
        """
        ...

    def add_norm(
        self, state: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Add `delta` (of `dtype`) to `state`, FLOAT32 [tokens, hidden], in place; its RMS norm as `dtype`."""
        ...

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half of each row times its second half: [tokens, 2 width] to [tokens, width]."""
        ...

    def whole(self, network: Network) -> Pass | None:
        """The forward pass of `network` as one operation; None where there is none."""
        ...
