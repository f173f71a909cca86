"""The unified vision transformer of section III-B: prompts before a block's first norm, merging before its MLP.

The output of a prompt is dropped after its block (VPT-deep), so only its key and value matter. These do not depend on
the image: `fold` computes them once per task, and the blocks attend to them. The result equals that of prompts
computed as tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from shapeshift.engines.casts import to_f32
from shapeshift.engines.interfaces import Array
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.merging import Matching, merge_patches
from shapeshift.token_adapt.model.schedule import Layer
from shapeshift.token_adapt.model.vision_model import PromptFolding

Tensor = torch.Tensor

# Those of `Architecture`, and that of a gate.
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
}


class Rotation(nn.Module):
    """Rotates the queries and keys of patches by their places in the image (DINOv3). It has no weights: it is a module
    so that an engine can keep it in f32.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.side, self.prefix = architecture.image_size // architecture.patch_size, architecture.prefix
        self.frequencies = [2 * math.pi * architecture.rope**-power for power in _powers(architecture.head_width)]

    def places(self) -> Tensor:
        """The centres of the patches, -1 to 1, down and right: [1, patches, 2]."""
        edge = (2.0 * torch.arange(self.side) + 1.0) / self.side - 1.0
        return torch.stack(torch.meshgrid(edge, edge, indexing="ij"), 2).view(1, -1, 2)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x [n, heads, t, dim]; places of its patches [n, t - prefix, 2]. What stands before them is not rotated."""
        frequencies = torch.tensor(self.frequencies, device=x.device)
        angles = (to_f32(places).unsqueeze(3) * frequencies).flatten(2).repeat(1, 1, 2).unsqueeze(1)
        before, patches = x[:, :, : self.prefix], to_f32(x[:, :, self.prefix :])
        first, second = patches.chunk(2, dim=-1)
        rotated = patches * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
        return torch.cat((before, rotated.to(x.dtype)), 2)


def _powers(head_width: int) -> list[float]:
    """Half of the numbers of a head are for each direction, and each frequency turns two of them."""
    return [4 * index / head_width for index in range(head_width // 4)]


class Attention(nn.Module):
    """Self-attention over tokens and folded prompts. A token's weight is the number of patches merged in it."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        width = architecture.width
        self.heads, self.head_width = architecture.heads, architecture.head_width
        self.qkv = nn.Linear(width, 3 * width, bias=architecture.qkv_bias)
        self.q_norm, self.k_norm = (_norm(self.head_width, architecture, architecture.qk_norm) for _ in range(2))
        self.rotation = Rotation(architecture) if architecture.rope else None
        self.proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, sizes: Tensor | None, places: Tensor | None, prompts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [n, t, width], sizes [n, t] (None: all 1) -> output [n, t, width], keys [n, heads, t, dim]."""
        n, t, width = x.shape
        query, key, value = self._split(self.qkv(x), 3).unbind(0)
        query, key = self.q_norm(query), self.k_norm(key)
        mask = None if sizes is None else sizes.log().view(n, 1, 1, t)
        keys = key
        if self.rotation is not None and places is not None:
            query, key = self.rotation(query, places), self.rotation(key, places)
        if prompts is not None:
            prompt_key, prompt_value = prompts.unbind(1)
            key, value = torch.cat((key, prompt_key), 2), torch.cat((value, prompt_value), 2)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.proj(attended.transpose(1, 2).reshape(n, t, width)), keys

    def fold(self, prompts: Tensor) -> Tensor:
        """Normalised prompts [n, g, width] -> keys and values [n, 2, heads, g, head width]."""
        width = prompts.shape[2]
        bias = None if self.qkv.bias is None else self.qkv.bias[width:]
        key, value = self._split(functional.linear(prompts, self.qkv.weight[width:], bias), 2).unbind(0)
        return torch.stack((self.k_norm(key), value), 1)

    def _split(self, x: Tensor, parts: int) -> Tensor:
        """[n, t, parts * width] -> [parts, n, heads, t, head width]."""
        return x.view(x.shape[0], x.shape[1], parts, self.heads, self.head_width).permute(2, 0, 3, 1, 4)


class Mlp(nn.Module):
    """Two linear layers; with a gate, the first computes the gate and what it multiplies, side by side."""

    def __init__(self, architecture: Architecture, gated: bool) -> None:
        super().__init__()
        width, inner = architecture.width, architecture.mlp_width
        self.activate, self.gated = _ACTIVATIONS["silu" if gated else architecture.activation], gated
        self.fc1, self.fc2 = nn.Linear(width, inner * (1 + gated)), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, t, width] -> [n, t, width]"""
        hidden = self.fc1(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = self.activate(gate) * hidden
        else:
            hidden = self.activate(hidden)
        output: Tensor = self.fc2(hidden)
        return output


class Block(nn.Module):
    """Attention, merging, MLP; pre-norm."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.prefix = architecture.prefix
        width = architecture.width
        self.norm1, self.norm2 = (_norm(width, architecture) for _ in range(2))
        self.attention = Attention(architecture)
        self.matching = Matching()
        self.mlp = Mlp(architecture, architecture.gated)
        scales = (nn.Parameter(torch.ones(width)) if architecture.layer_scale else None for _ in range(2))
        self.scale1, self.scale2 = scales

    def forward(
        self, x: Tensor, sizes: Tensor | None, places: Tensor | None, prompts: Tensor | None, merged: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x [n, t, width], sizes [n, t] (None: all 1), places [n, patches, 2] of patches that are rotated, prompts from
        `fold` -> x, sizes and places after merging.
        """
        attended, keys = self.attention(self.norm1(x), sizes, places, prompts)
        x = x + (attended if self.scale1 is None else attended * self.scale1)
        if merged:
            x, sizes, places = self._merge(x, sizes, places, keys, merged)
        output = self.mlp(self.norm2(x))
        return x + (output if self.scale2 is None else output * self.scale2), sizes, places

    def _merge(
        self, x: Tensor, sizes: Tensor | None, places: Tensor | None, keys: Tensor, merged: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if sizes is None:
            sizes = torch.ones_like(x[:, :, 0])
        prefix = self.prefix
        matches = self.matching(keys[:, :, prefix:], merged)
        patches, patch_sizes = merge_patches(x[:, prefix:], sizes[:, prefix:], matches)
        if places is not None:
            # A merged token stands in the middle of its patches.
            places, _ = merge_patches(places.expand(x.shape[0], -1, -1), to_f32(sizes[:, prefix:]), matches)
        x = torch.cat((x[:, :prefix], patches), 1)
        return x, torch.cat((sizes[:, :prefix], patch_sizes), 1), places

    def fold(self, prompts: Tensor) -> Tensor:
        """Prompts of this block [n, g, width] -> keys and values [n, 2, heads, g, head width]."""
        folded: Tensor = self.attention.fold(self.norm1(prompts))
        return folded


class AttentionPool(nn.Module):
    """A learned query reads all tokens; an MLP follows (SigLIP)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        width = architecture.width
        self.heads, self.head_width = architecture.heads, architecture.head_width
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.mlp = _norm(width, architecture), Mlp(architecture, gated=False)

    def forward(self, x: Tensor, sizes: Tensor | None) -> Tensor:
        """x [n, t, width], sizes [n, t] (None: all 1) -> [n, width]"""
        n, t, width = x.shape
        weight, bias = self.qkv.weight, self.qkv.bias
        query = functional.linear(self.query.expand(n, -1, -1), weight[:width], bias[:width])
        split = functional.linear(x, weight[width:], bias[width:]).view(n, t, 2, self.heads, self.head_width)
        key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        query = query.view(n, 1, self.heads, self.head_width).transpose(1, 2)
        mask = None if sizes is None else sizes.log().view(n, 1, 1, t)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        pooled = self.proj(attended.transpose(1, 2).reshape(n, width))
        output: Tensor = pooled + self.mlp(self.norm(pooled))
        return output


class UnifiedViT(nn.Module):
    """Images to features, the input of the task heads."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        width = architecture.width
        self.architecture = architecture
        self.patch = nn.Linear(3 * architecture.patch_size**2, width)
        self.prefix = nn.Parameter(torch.zeros(1, architecture.prefix, width))
        self.position = nn.Parameter(torch.zeros(1, architecture.patches, width))
        self.norm_pre = _norm(width, architecture, architecture.norm_pre)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(architecture.depth))
        self.norm = _norm(width, architecture, architecture.norm_final)
        self.fc_norm = _norm(width, architecture, architecture.norm_pooled)
        self.pool = AttentionPool(architecture) if architecture.attention_pool else None
        self.projection = (
            nn.Linear(architecture.pooled_width, architecture.projection, bias=architecture.projection_bias)
            if architecture.projection
            else nn.Identity()
        )

    def forward(self, pixels: Tensor, layers: Sequence[Layer], prompts: Sequence[Tensor] | None = None) -> Tensor:
        """pixels [n, size, size, 3] -> features [n, features]; `prompts` from `fold`, one entry per block."""
        return self.encode(self.embed(pixels), layers, prompts)

    def embed(self, pixels: Tensor) -> Tensor:
        """pixels [n, size, size, 3] -> patch tokens with positions [n, patches, width]."""
        side, size = self.architecture.image_size // self.architecture.patch_size, self.architecture.patch_size
        patches = pixels.to(self.patch.weight.dtype).view(-1, side, size, side, size, 3).permute(0, 1, 3, 2, 4, 5)
        embedded: Tensor = self.patch(patches.reshape(-1, side * side, 3 * size**2)) + self.position
        return embedded

    def encode(self, patches: Tensor, layers: Sequence[Layer], prompts: Sequence[Tensor] | None = None) -> Tensor:
        """Embedded patches [n, t, width] -> features [n, features]: all blocks, then pooling."""
        x, sizes, places = self._with_prefix(patches), None, self._places()
        for index, (block, layer) in enumerate(zip(self.blocks, layers, strict=True)):
            x, sizes, places = block(x, sizes, places, None if prompts is None else prompts[index], layer.merged)
        return self._pool(x, sizes)

    def block_inputs(self, pixels: Tensor) -> list[Tensor]:
        """pixels [n, size, size, 3] -> the input of each block at gamma 0, [n, t, width]."""
        inputs = [self._with_prefix(self.embed(pixels))]
        for block in self.blocks[:-1]:
            inputs.append(block(inputs[-1], None, self._places(), None, 0)[0])
        return inputs

    def _places(self) -> Tensor | None:
        """Of patches that are rotated."""
        return Rotation(self.architecture).places().to(self.patch.weight.device) if self.architecture.rope else None

    def _with_prefix(self, patches: Tensor) -> Tensor:
        tokens: Tensor = self.norm_pre(torch.cat((self.prefix.expand(patches.shape[0], -1, -1), patches), 1))
        return tokens

    def _pool(self, x: Tensor, sizes: Tensor | None) -> Tensor:
        architecture, prefix = self.architecture, self.architecture.prefix
        parts = [self.fc_norm(self.norm(x[:, : architecture.pooled])).flatten(1)] if architecture.pooled else []
        if architecture.pooled_patches:
            patches = self.norm(x[:, prefix:])
            weights = torch.ones_like(patches[:, :, :1]) if sizes is None else sizes[:, prefix:].unsqueeze(2)
            parts.append(self.fc_norm((patches * weights).sum(1) / weights.sum(1)))
        if self.pool is not None:
            parts.append(self.fc_norm(self.pool(self.norm(x), sizes)))
        features: Tensor = self.projection(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        return features

    def fold(self, prompts: Tensor) -> list[Tensor]:
        """Prompts [n, depth, g, width] -> for each block, keys and values [n, 2, heads, g, head width]."""
        blocks = cast("Iterable[Block]", self.blocks)
        return [block.fold(prompts[:, index]) for index, block in enumerate(blocks)]


def _norm(width: int, architecture: Architecture, exists: bool = True) -> nn.Module:
    return nn.LayerNorm(width, architecture.epsilon) if exists else nn.Identity()


def prompt_folding(state: Mapping[str, Array], depth: int, heads: int, epsilon: float) -> PromptFolding:
    """How prompts are folded without torch, from the parameters of a `UnifiedViT`."""

    def stacked(name: str) -> Array:
        return np.stack([state[f"blocks.{index}.{name}"] for index in range(depth)])

    weight = stacked("attention.qkv.weight")
    width = weight.shape[2]
    has_bias = "blocks.0.attention.qkv.bias" in state
    bias = stacked("attention.qkv.bias")[:, width:] if has_bias else np.zeros((depth, 2 * width), np.float32)
    has_key_norm = "blocks.0.attention.k_norm.weight" in state
    key_norm = [stacked(f"attention.k_norm.{kind}") if has_key_norm else None for kind in ("weight", "bias")]
    norm_weight, norm_bias = stacked("norm1.weight"), stacked("norm1.bias")
    return PromptFolding(norm_weight, norm_bias, weight[:, width:], bias, heads, epsilon, *key_norm)
