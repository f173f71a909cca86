"""`UnifiedViT.fold` without torch, for serving: prompts to the keys and values that engines take.

Its weights are in a file beside the engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from shapeshift.engines.interfaces import Array

FILE_NAME = "folding.safetensors"


@dataclass(frozen=True)
class PromptFolding:
    """The first norm and the key and value projections of all blocks.

    norm_weight, norm_bias [depth, width]; weight [depth, 2 width, width]; bias [depth, 2 width];
    key_weight, key_bias [depth, head width]: the norm of the keys, or None.
    """

    norm_weight: Array
    norm_bias: Array
    weight: Array
    bias: Array
    heads: int
    epsilon: float
    key_weight: Array | None = None
    key_bias: Array | None = None

    def fold(self, prompts: Array) -> Array:
        """Prompts [depth, g, width] -> keys and values, FP32 [depth, 2, heads, g, head width]."""
        depth, count, width = prompts.shape
        normal = _layer_norm(prompts.astype(np.float32), self.norm_weight, self.norm_bias, self.epsilon)
        keys_values = normal @ self.weight.transpose(0, 2, 1) + self.bias[:, None]
        split = keys_values.reshape(depth, count, 2, self.heads, width // self.heads).transpose(0, 2, 3, 1, 4).copy()
        if self.key_weight is not None and self.key_bias is not None:
            keys = split[:, 0].reshape(depth, -1, width // self.heads)
            keys = _layer_norm(keys, self.key_weight, self.key_bias, self.epsilon)
            split[:, 0] = keys.reshape(split[:, 0].shape)
        return np.ascontiguousarray(split, np.float32)

    def save(self, folder: Path) -> None:
        """Write the weights into `folder`."""
        weights = {
            "norm_weight": self.norm_weight,
            "norm_bias": self.norm_bias,
            "weight": self.weight,
            "bias": self.bias,
        }
        if self.key_weight is not None and self.key_bias is not None:
            weights |= {"key_weight": self.key_weight, "key_bias": self.key_bias}
        save_file(
            {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}, folder / FILE_NAME
        )


def load(folder: Path, heads: int, epsilon: float) -> PromptFolding:
    """Read what `save` wrote."""
    return PromptFolding(**load_file(folder / FILE_NAME), heads=heads, epsilon=epsilon)


def from_state(state: Mapping[str, Array], depth: int, heads: int, epsilon: float) -> PromptFolding:
    """From the parameters of a `UnifiedViT`."""

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


def _layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Over the last axis of [depth, n, width]."""
    centred = x - x.mean(2, keepdims=True)
    scale = np.sqrt(np.square(centred).mean(2, keepdims=True) + epsilon)
    normal: Array = centred / scale * weight[:, None] + bias[:, None]
    return normal
