"""Weights and rows as integer levels, and their products in plain torch: the reference of `kernels/linear_levels.h`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_LEVEL = 127
"""Of a row's levels, which are -127 to 127."""
_EXACT_INPUTS = 512
"""Inputs whose products of levels, at most 255 and 127, have sums that f32 holds exactly: below 2^24."""


@dataclass(frozen=True)
class Levels:
    """A weight [outputs, inputs]: scale times (level - zero), where groups of inputs share a scale and a zero.

    levels  UINT8 [outputs, inputs], 0 to 2^bits - 1
    scales  FLOAT32 [outputs, groups]
    zeros   UINT8 [outputs, groups]
    bits    8 or 4
    group   inputs of a group, a multiple of 32; 0: all inputs are one group
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group: int

    def weight(self) -> torch.Tensor:
        """The weight that the levels stand for, FLOAT32 [outputs, inputs]."""
        inputs = self.levels.shape[1]
        scales, zeros = (
            values.repeat_interleave(self.group or inputs, dim=1)[:, :inputs] for values in (self.scales, self.zeros)
        )
        return (self.levels.float() - zeros.float()) * scales


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


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels INT8 [..., inputs] and scales FLOAT32 [..., 1] of rows [..., inputs], each row by itself.

    The scale of a row with a value that is not finite is not finite either.
    """
    values = rows.float()
    largest = values.abs().amax(dim=-1, keepdim=True)
    factors = torch.where(largest > 0, MOST_LEVEL / largest, 0.0)
    levels = (values * factors).round().nan_to_num(nan=-MOST_LEVEL).clamp(-MOST_LEVEL, MOST_LEVEL)
    return levels.to(torch.int8), largest / MOST_LEVEL


class LevelLinear:
    """y = x weight^T + bias, of rows in any dtype, over a weight in levels. Needs no compiler; slow.

    Rows are quantised one by one. Sums within a group are exact, so that a row's result does not depend on the others.
    """

    def __init__(self, weight: Levels, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.float()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        levels, scales = quantise_rows(rows)
        own = self._weight
        width = own.group or own.levels.shape[1]
        out = torch.zeros(rows.shape[0], own.levels.shape[0])
        for group, given in enumerate(torch.split(levels, width, dim=1)):
            sums = _products(given, own.levels[:, group * width : (group + 1) * width])
            sums -= given.sum(dim=1, dtype=torch.int32)[:, None] * own.zeros[:, group].int()
            out += own.scales[:, group] * sums.float()
        out *= scales
        return (out if self._bias is None else out + self._bias).to(rows.dtype)


def _products(rows: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """rows [rows, inputs] times levels [outputs, inputs], INT32 [rows, outputs], exact."""
    parts = zip(torch.split(rows, _EXACT_INPUTS, dim=1), torch.split(levels, _EXACT_INPUTS, dim=1), strict=True)
    found = torch.zeros(rows.shape[0], levels.shape[0], dtype=torch.int32)
    for given, own in parts:
        found += (given.float() @ own.float().T).int()
    return found
