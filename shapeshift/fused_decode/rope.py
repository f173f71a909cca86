"""Rotary position embedding as tables of cosines and sines."""

from __future__ import annotations

import math

import torch

from shapeshift.fused_decode.architecture import Architecture, Rope


def tables(architecture: Architecture, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0 to length-1, FLOAT32 [length, head_dim / 2] each.

    Element i of a head turns with element i + head_dim / 2, as in Hugging Face's checkpoints.
    """
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies(architecture.rope, architecture.head_dim)
    return angles.cos(), angles.sin()


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians a position for each pair of a head, FLOAT32 [head_dim / 2]."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: waves that fit `high` times into the original length stay, those that do not fit `low` times
    are stretched by `factor`, and between the two the shares change linearly with the number of turns."""
    turns = rope.original * plain / (2 * math.pi)
    kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor
