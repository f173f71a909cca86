"""How the weights of a checkpoint become linears of a precision on a CPU."""

from __future__ import annotations

import torch

from shapeshift.fused_decode.model.assembly import LinearMakers, MakeLinear
from shapeshift.fused_decode.model.linear import Linear, maker
from shapeshift.fused_decode.model.native_operations import NativeLevelLinear, NativeLinear
from shapeshift.fused_decode.model.precision import HEAD_BITS, QUANTISED, WEIGHT_BITS, group_of
from shapeshift.fused_decode.model.quantised.levels import LevelLinear, quantise
from shapeshift.serving.model_args import Log


def linear_makers(precision: str, group_size: int, dtype: torch.dtype, native: bool, log: Log) -> LinearMakers:
    """The makers of a network whose activations are of `dtype`.

    Weights that become levels are quantised here, from f32: it takes a second for a billion of them.
    group_size  see `precision.group_of`
    native      whether the native operations are loaded
    """
    if precision not in QUANTISED:
        make: MakeLinear = NativeLinear if native else maker(dtype, log)
        return LinearMakers(make, make, dtype)
    kind = NativeLevelLinear if native else LevelLinear

    def of_bits(bits: int) -> MakeLinear:
        def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            return kind(quantise(weight, bits, group_of(bits, weight.shape[1], group_size)), bias)

        return make

    bits = WEIGHT_BITS[precision]
    return LinearMakers(of_bits(bits), of_bits(HEAD_BITS), torch.float32, kind, bits)
