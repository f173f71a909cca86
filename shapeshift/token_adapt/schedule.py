"""How many tokens each layer computes: a gamma, expanded once into a list that everything else reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shapeshift.errors import InvalidInputError


@dataclass(frozen=True)
class Layer:
    """One block: patches that enter it, patches merged away between attention and MLP, prompts in its attention."""

    patches: int
    merged: int
    prompts: int


def expand(gamma: int, patches: int, depth: int) -> tuple[Layer, ...]:
    """The layers of a model of `patches` and `depth` at `gamma` (section III-B).

    gamma > 0 adds that many prompts to every layer's attention; gamma < 0 merges that many patches in each,
    never more than half of those left.
    """
    if depth < 1 or patches < 1:
        raise InvalidInputError("schedule", (patches, depth), "at least one patch and one layer")
    layers = []
    for _ in range(depth):
        merged = min(max(-gamma, 0), patches // 2)
        layers.append(Layer(patches, merged, max(gamma, 0)))
        patches -= merged
    return tuple(layers)


def arithmetic(layers: Sequence[Layer], width: int, prefix: int = 1) -> int:
    """Multiplications by the paper's count: sum of 12 n d^2 + 2 n^2 d over the layers.

    n is the token count before merging in the attention (4 n d^2 + 2 n^2 d), after it in the MLP (8 n d^2).
    """
    total = 0
    for layer in layers:
        before = prefix + layer.patches
        total += 4 * before * width**2 + 2 * before * (before + layer.prompts) * width
        total += 8 * (before - layer.merged) * width**2
    return total


def activation_mb(layers: Sequence[Layer], width: int, heads: int, mlp_width: int, prefix: int = 1) -> float:
    """MB (10^6 bytes) of f32 activations that one image needs at once: the largest layer's, counted not measured.

    In the attention these are tokens, queries, keys, values and scores, in the MLP tokens and the widened tokens.
    """
    most = 0
    for layer in layers:
        tokens, seen = prefix + layer.patches, prefix + layer.patches + layer.prompts
        attention = 3 * tokens * width + 2 * seen * width + heads * tokens * seen
        most = max(most, attention, (tokens - layer.merged) * (2 * width + mlp_width))
    return 4 * most / 1e6


def tokens_after(layers: Sequence[Layer], prefix: int = 1) -> int:
    """Tokens that leave the last block."""
    return prefix + layers[-1].patches - layers[-1].merged
