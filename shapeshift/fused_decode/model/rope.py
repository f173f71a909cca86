"""The scalings of rotary frequencies.

Each takes the plain frequencies, FLOAT32 [rotated / 2], and the length of the longest text that they are for.
"""

from __future__ import annotations

import math

import torch

from shapeshift.fused_decode.model.parts import Rope


def default(rope: Rope, plain: torch.Tensor, length: int) -> torch.Tensor:
    return plain


def linear(rope: Rope, plain: torch.Tensor, length: int) -> torch.Tensor:
    return plain / rope.factor


def llama3(rope: Rope, plain: torch.Tensor, length: int) -> torch.Tensor:
    """Llama 3.1: waves that fit `high` times into the original length stay, waves that do not fit `low` times are
    stretched by `factor`, and between the two the shares change linearly with the number of turns."""
    turns = rope.original * plain / (2 * math.pi)
    share = ((turns - rope.low) / max(rope.high - rope.low, 1e-9)).clamp(0.0, 1.0)
    return share * plain + (1.0 - share) * plain / rope.factor


def yarn(rope: Rope, plain: torch.Tensor, length: int) -> torch.Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): as Llama 3.1, but the shares change linearly with the pair."""

    def pair(turns: float) -> float:
        """The place among the elements whose wave turns this often in the original length."""
        return rope.rotated * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.high), pair(rope.low)
    if rope.truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotated - 1)
    places = torch.arange(len(plain), dtype=torch.float32)
    stretched = ((places - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return stretched * plain / rope.factor + (1.0 - stretched) * plain


def dynamic(rope: Rope, plain: torch.Tensor, length: int) -> torch.Tensor:
    """A base that grows with the text, so that its slowest wave turns no further than in the original length."""
    beyond = 1.0 + rope.factor * (max(length, rope.original) / rope.original - 1.0)
    exponents = torch.arange(0, rope.rotated, 2, dtype=torch.float32) / rope.rotated
    return plain * beyond ** (-exponents * rope.rotated / (rope.rotated - 2))


def proportional(rope: Rope, plain: torch.Tensor, length: int) -> torch.Tensor:
    return torch.where(torch.arange(len(plain)) < rope.turning, plain / rope.factor, 0.0)


def longrope(rope: Rope, plain: torch.Tensor, length: int) -> torch.Tensor:
    return plain / torch.tensor(rope.long if length > rope.original else rope.short)
