"""The unified vision transformer of section III-B: prompts before each block's normalisation, merging before its MLP.

A prompt's own output is dropped after its block (VPT-deep), so that only its key and value matter, and these do
not depend on the image: `fold` computes them once for a task, and the blocks attend to what it made. The result is
that of prompts computed as tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from shapeshift.token_adapt.architecture import Architecture
from shapeshift.token_adapt.merging import merge_patches
from shapeshift.token_adapt.schedule import Layer

Tensor = torch.Tensor


class Attention(nn.Module):
    """Self-attention over tokens and folded prompts, each token weighted by the number of patches it stands for."""

    def __init__(self, made: Architecture) -> None:
        super().__init__()
        self.heads, self.head_width = made.heads, made.head_width
        self.qkv = nn.Linear(made.width, 3 * made.width, bias=made.qkv_bias)
        self.query_norm = nn.LayerNorm(made.head_width, made.epsilon) if made.qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(made.head_width, made.epsilon) if made.qk_norm else nn.Identity()
        self.out = nn.Linear(made.width, made.width)

    def forward(self, x: Tensor, sizes: Tensor | None, prompts: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [n, t, width] and sizes [n, t] to the output and the keys [n, t, head width], averaged over the heads."""
        n, t, width = x.shape
        query, key, value = self._split(self.qkv(x), 3).unbind(0)
        query, key = self.query_norm(query), self.key_norm(key)
        mask = None if sizes is None else sizes.log().view(n, 1, 1, t)
        keys = key.mean(1)
        if prompts is not None:
            added = prompts.unbind(1)
            key, value = torch.cat((key, added[0]), 2), torch.cat((value, added[1]), 2)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(n, t, width)), keys

    def fold(self, prompts: Tensor) -> Tensor:
        """Keys and values [n, 2, heads, g, head width] of normalised prompts [n, g, width]."""
        width = prompts.shape[2]
        bias = None if self.qkv.bias is None else self.qkv.bias[width:]
        key, value = self._split(functional.linear(prompts, self.qkv.weight[width:], bias), 2).unbind(0)
        return torch.stack((self.key_norm(key), value), 1)

    def _split(self, x: Tensor, parts: int) -> Tensor:
        """[n, t, parts * width] to [parts, n, heads, t, head width]."""
        return x.view(x.shape[0], x.shape[1], parts, self.heads, self.head_width).permute(2, 0, 3, 1, 4)


class Block(nn.Module):
    """Attention, merging, MLP; both branches behind a normalisation."""

    def __init__(self, made: Architecture) -> None:
        super().__init__()
        self.prefix = made.prefix
        self.norm1, self.norm2 = (nn.LayerNorm(made.width, made.epsilon) for _ in range(2))
        self.attention = Attention(made)
        self.widen, self.narrow = nn.Linear(made.width, made.mlp_width), nn.Linear(made.mlp_width, made.width)
        gates = (nn.Parameter(torch.ones(made.width)) if made.gated else None for _ in range(2))
        self.gate1, self.gate2 = gates

    def forward(
        self, x: Tensor, sizes: Tensor | None, prompts: Tensor | None, merged: int
    ) -> tuple[Tensor, Tensor | None]:
        """x [n, t, width], sizes [n, t] (None: all 1), prompts as `Attention.fold` makes them; both after merging."""
        attended, keys = self.attention(self.norm1(x), sizes, prompts)
        x = x + (attended if self.gate1 is None else attended * self.gate1)
        if merged:
            x, sizes = self._merge(x, sizes, keys, merged)
        widened = self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return x + (widened if self.gate2 is None else widened * self.gate2), sizes

    def _merge(self, x: Tensor, sizes: Tensor | None, keys: Tensor, merged: int) -> tuple[Tensor, Tensor]:
        known = torch.ones_like(x[:, :, 0]) if sizes is None else sizes
        first = self.prefix
        patches, counts = merge_patches(x[:, first:], known[:, first:], keys[:, first:], merged)
        return torch.cat((x[:, :first], patches), 1), torch.cat((known[:, :first], counts), 1)

    def fold(self, prompts: Tensor) -> Tensor:
        """Keys and values [n, 2, heads, g, head width] of this block's prompts [n, g, width]."""
        folded: Tensor = self.attention.fold(self.norm1(prompts))
        return folded


class UnifiedViT(nn.Module):
    """Images to the features that heads read; see `Architecture` for its parts."""

    def __init__(self, made: Architecture) -> None:
        super().__init__()
        self.made = made
        self.patch = nn.Linear(3 * made.patch_size**2, made.width)
        self.prefix = nn.Parameter(torch.zeros(1, made.prefix, made.width))
        self.position = nn.Parameter(torch.zeros(1, made.patches, made.width))
        self.first = nn.LayerNorm(made.width, made.epsilon) if made.norm_first else nn.Identity()
        self.blocks = nn.ModuleList(Block(made) for _ in range(made.depth))
        self.last = nn.LayerNorm(made.width, made.epsilon) if made.norm_last else nn.Identity()
        self.pooled = nn.LayerNorm(made.width, made.epsilon) if made.norm_pooled else nn.Identity()

    def forward(self, pixels: Tensor, layers: Sequence[Layer], prompts: Sequence[Tensor] | None = None) -> Tensor:
        """pixels [n, size, size, 3] to features [n, features]; prompts for each block as `fold` makes them."""
        return self.encode(self.embed(pixels), layers, prompts)

    def embed(self, pixels: Tensor) -> Tensor:
        """Patches as tokens with their positions, [n, patches, width]."""
        side, size = self.made.image_size // self.made.patch_size, self.made.patch_size
        cut = pixels.to(self.patch.weight.dtype).view(-1, side, size, side, size, 3).permute(0, 1, 3, 2, 4, 5)
        embedded: Tensor = self.patch(cut.reshape(-1, side * side, 3 * size**2)) + self.position
        return embedded

    def encode(self, patches: Tensor, layers: Sequence[Layer], prompts: Sequence[Tensor] | None = None) -> Tensor:
        """The blocks over embedded patches [n, t, width], then pooling: [n, features]."""
        x, sizes = self._first_tokens(patches), None
        for index, (block, layer) in enumerate(zip(self.blocks, layers, strict=True)):
            x, sizes = block(x, sizes, None if prompts is None else prompts[index], layer.merged)
        return self._pool(x, sizes)

    def entering(self, pixels: Tensor) -> list[Tensor]:
        """What enters each block where nothing is merged, [n, t, width], of pixels [n, size, size, 3]."""
        found = [self._first_tokens(self.embed(pixels))]
        for block in self.blocks[:-1]:
            found.append(block(found[-1], None, None, 0)[0])
        return found

    def _first_tokens(self, patches: Tensor) -> Tensor:
        tokens: Tensor = self.first(torch.cat((self.prefix.expand(patches.shape[0], -1, -1), patches), 1))
        return tokens

    def _pool(self, x: Tensor, sizes: Tensor | None) -> Tensor:
        if self.made.pooled:
            pooled: Tensor = self.pooled(self.last(x[:, : self.made.pooled])).flatten(1)
            return pooled
        patches = self.last(x[:, self.made.prefix :])
        weights = torch.ones_like(patches[:, :, :1]) if sizes is None else sizes[:, self.made.prefix :].unsqueeze(2)
        mean: Tensor = self.pooled((patches * weights).sum(1) / weights.sum(1))
        return mean

    def fold(self, prompts: Tensor) -> list[Tensor]:
        """Keys and values of each block's prompts, [n, 2, heads, g, head width], of prompts [n, depth, g, width]."""
        blocks = cast("Iterable[Block]", self.blocks)
        return [block.fold(prompts[:, index]) for index, block in enumerate(blocks)]
