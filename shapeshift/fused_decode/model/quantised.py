"""Rows as integer levels, and their products with weights in levels.

Imported where weights or the cache are quantised. The products in plain torch are the reference of
`kernels/linear_levels.h`.
"""

from __future__ import annotations

import torch

from shapeshift.fused_decode.model.assembly import LinearMakers, MakeLinear
from shapeshift.fused_decode.model.native_operations import NativeLinear, PackedWeight, by_panel, pack_levels
from shapeshift.fused_decode.model.network import Linear
from shapeshift.fused_decode.settings import HEAD_BITS, WEIGHT_BITS, group_of
from shapeshift.kernels.levels import Levels, quantise

MOST_LEVEL = 127
"""Of a row's levels, which are -127 to 127."""
_EXACT_INPUTS = 512
"""Inputs whose products of levels, at most 255 and 127, have sums that f32 holds exactly: below 2^24."""


def quantise_rows(rows: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels INT8 [..., inputs] and scales FLOAT32 [..., groups] of rows [..., inputs], each group by itself.

    group: inputs of a group, of which the last one may have fewer; 0: all. The scale of a group with a value that is
    not finite is not finite either.
    """
    inputs = rows.shape[-1]
    if group and group < inputs:
        padded = torch.nn.functional.pad(rows, (0, -inputs % group)).reshape(*rows.shape[:-1], -1, group)
        levels, scales = quantise_rows(padded)
        return levels.flatten(-2)[..., :inputs].contiguous(), scales.squeeze(-1)
    values = rows.float()
    largest = values.abs().amax(dim=-1, keepdim=True)
    factors = torch.where(largest > 0, MOST_LEVEL / largest, 0.0)
    levels = (values * factors).round().nan_to_num(nan=-MOST_LEVEL).clamp(-MOST_LEVEL, MOST_LEVEL)
    return levels.to(torch.int8), largest / MOST_LEVEL


class LevelLinear:
    """y = x weight^T + bias, of rows in any dtype, over a weight in levels. Needs no compiler; slow.

    Each group of inputs of a row is quantised by itself. Sums within a group are exact, so that a row's result does not
    depend on the others.
    """

    def __init__(self, weight: Levels, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.float()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        levels, row_scales = quantise_rows(rows, weight.group)
        width = weight.group or weight.levels.shape[1]
        out = torch.zeros(rows.shape[0], weight.levels.shape[0])
        for group, row_part in enumerate(torch.split(levels, width, dim=1)):
            sums = _products(row_part, weight.levels[:, group * width : (group + 1) * width])
            sums -= row_part.sum(dim=1, dtype=torch.int32)[:, None] * weight.zeros[:, group].int()
            scale = row_scales[:, group, None]
            out += weight.scales[:, group] * scale * sums.float()
            if weight.minima is not None:
                out += weight.minima[:, group] * scale * row_part.sum(dim=1, dtype=torch.int32)[:, None].float()
        return (out if self._bias is None else out + self._bias).to(rows.dtype)


def _products(rows: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """rows [rows, inputs] times levels [outputs, inputs], INT32 [rows, outputs], exact."""
    parts = zip(torch.split(rows, _EXACT_INPUTS, dim=1), torch.split(levels, _EXACT_INPUTS, dim=1), strict=True)
    sums = torch.zeros(rows.shape[0], levels.shape[0], dtype=torch.int32)
    for row_part, level_part in parts:
        sums += (row_part.float() @ level_part.float().T).int()
    return sums


class NativeLevelLinear(NativeLinear):
    """See `LevelLinear`: the same sums, by `kernels/linear_levels.h`.

    instructions: tiles (AMX), quads (VNNI), plain, or best.
    """

    def __init__(self, weight: Levels, bias: torch.Tensor | None, instructions: str = "best") -> None:
        packed = pack_levels(weight.levels, weight.bits)
        outputs, inputs = weight.levels.shape
        tensors = {"packed": packed, "scales": by_panel(weight.scales), "zeros": by_panel(weight.zeros)}
        if weight.minima is not None:
            tensors["minima"] = by_panel(weight.minima)
        if bias is not None:
            tensors["bias"] = bias
        self._hold(PackedWeight(f"LinearLevels{weight.bits}", (inputs, outputs, weight.group), tensors), instructions)


def level_makers(precision: str, group_size: int, native: bool) -> LinearMakers:
    """The makers of linears whose weights become levels; see `assembly.linear_makers`.

    Weights are quantised here, from f32: it takes a second for a billion of them.
    """
    kind = NativeLevelLinear if native else LevelLinear

    def of_bits(bits: int) -> MakeLinear:
        def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            return kind(quantise(weight, bits, group_of(bits, weight.shape[1], group_size)), bias)

        return make

    bits = WEIGHT_BITS[precision]
    return LinearMakers(of_bits(bits), of_bits(HEAD_BITS), torch.float32, kind, bits)
