"""Weights as integer levels, as `levels.h` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Levels:
    """A weight [outputs, inputs]: scale times (level - zero), plus minimum, each of a group of inputs.

    levels  UINT8 [outputs, inputs], 0 to 2^bits - 1
    scales  FLOAT32 [outputs, groups]
    zeros   UINT8 [outputs, groups]
    bits    8 or 4
    group   inputs of a group, a multiple of 32; 0: all inputs are one group
    minima  FLOAT32 [outputs, groups]; None: all are 0
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group: int
    minima: torch.Tensor | None = None

    def weight(self) -> torch.Tensor:
        """The weight that the levels stand for, FLOAT32 [outputs, inputs]."""
        weight = (self.levels.float() - self._of_inputs(self.zeros).float()) * self._of_inputs(self.scales)
        return weight if self.minima is None else weight + self._of_inputs(self.minima)

    def _of_inputs(self, values: torch.Tensor) -> torch.Tensor:
        """Values of groups as values of inputs."""
        inputs = self.levels.shape[1]
        return values.repeat_interleave(self.group or inputs, dim=1)[:, :inputs]

    def rows(self, order: torch.Tensor) -> Levels:
        """The outputs at the places `order`, INT64 [outputs]."""
        minima = None if self.minima is None else self.minima[order]
        return replace(
            self, levels=self.levels[order], scales=self.scales[order], zeros=self.zeros[order], minima=minima
        )

    @classmethod
    def stacked(cls, parts: Sequence[Levels]) -> Levels:
        """The outputs of `parts`, of the same bits and groups, one after another."""
        levels, scales, zeros = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("levels", "scales", "zeros")
        )
        minima = None
        if any(part.minima is not None for part in parts):
            minima = torch.cat(
                [torch.zeros_like(part.scales) if part.minima is None else part.minima for part in parts]
            )
        return replace(parts[0], levels=levels, scales=scales, zeros=zeros, minima=minima)


def quantise(weight: torch.Tensor, bits: int, group: int) -> Levels:
    """`weight` [outputs, inputs] as levels, symmetric: the largest magnitude of a group has the highest level.

    group: inputs of a group, of which the last one may have fewer; 0: all inputs.
    """
    outputs, inputs = weight.shape
    width = group or inputs
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % width)).view(outputs, -1, width)
    zero = 1 << (bits - 1)
    scales = padded.abs().amax(dim=-1) / (zero - 1)
    levels = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round().add(zero)
    levels = levels.to(torch.uint8).view(outputs, -1)[:, :inputs].contiguous()
    return Levels(levels, scales, torch.full_like(scales, zero, dtype=torch.uint8), bits, group)
