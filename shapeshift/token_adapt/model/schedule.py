"""The tokens of each layer at a gamma. Builder, model and benchmarks all read this list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shapeshift.errors import InvalidInputError


@dataclass(frozen=True)
class Layer:
    """One block: input patches, patches merged before the MLP, prompts in the attention."""

    patches: int
    merged: int
    prompts: int


def expand(gamma: int, patches: int, depth: int) -> tuple[Layer, ...]:
    """The layers at `gamma` (section III-B).

    gamma > 0 adds `gamma` prompts to the attention of each layer. gamma < 0 merges -gamma patches in each layer, at
    most half of its input.
    """
    if depth < 1 or patches < 1:
        raise InvalidInputError("schedule", (patches, depth), "at least 1 patch and 1 layer")
    layers = []
    for _ in range(depth):
        merged = min(max(-gamma, 0), patches // 2)
        layers.append(Layer(patches, merged, max(gamma, 0)))
        patches -= merged
    return tuple(layers)


def count_multiplications(layers: Sequence[Layer], width: int, prefix: int = 1) -> int:
    """The paper's count of multiplications: the sum of 12 n d^2 + 2 n^2 d over the layers.

    n is the token count before merging in the attention (4 n d^2 + 2 n^2 d) and after it in the MLP (8 n d^2).
    """
    total = 0
    for layer in layers:
        before = prefix + layer.patches
        total += 4 * before * width**2 + 2 * before * (before + layer.prompts) * width
        total += 8 * (before - layer.merged) * width**2
    return total


def activation_mb(layers: Sequence[Layer], width: int, heads: int, mlp_width: int, prefix: int = 1) -> float:
    """MiB of f32 activations of one image in the largest layer, computed and not measured.

    The attention holds tokens, queries, keys, values and scores; the MLP holds tokens and hidden values.
    """
    largest = 0
    for layer in layers:
        tokens, attended = prefix + layer.patches, prefix + layer.patches + layer.prompts
        attention = 3 * tokens * width + 2 * attended * width + heads * tokens * attended
        mlp = (tokens - layer.merged) * (2 * width + mlp_width)
        largest = max(largest, attention, mlp)
    return 4 * largest / 2**20


def output_tokens(layers: Sequence[Layer], prefix: int = 1) -> int:
    """Tokens after the last block."""
    return prefix + layers[-1].patches - layers[-1].merged
