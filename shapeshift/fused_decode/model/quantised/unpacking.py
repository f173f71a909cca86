"""Linears of AWQ and GPTQ checkpoints as levels, without changing a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.quantised.levels import Levels
from shapeshift.fused_decode.model.quantised.packing import AWQ, WORD_BITS, Packing

# The output of eight adjacent ones that each level of a word of AWQ belongs to, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MOST_ZERO = 255


def levels_of(name: str, tensors: Mapping[str, torch.Tensor], packing: Packing) -> Levels:
    """The weight [outputs, inputs] of the linear `name`, whose `tensors` have the shapes of `Packing.shapes`.

    Raises InvalidInputError where inputs are not in the order of their groups, or a zero lies beyond all levels.
    """
    if "g_idx" in tensors:
        _require_order(name, tensors["g_idx"], packing)
    word = tensors["qweight"]
    if packing.method == AWQ:
        levels, zeros = (_unpacked(one, packing.bits, _AWQ_ORDER) for one in (word, tensors["qzeros"]))
    else:
        order = tuple(range(packing.per_word))
        levels = _unpacked(word.T, packing.bits, order).T
        zeros = _unpacked(tensors["qzeros"], packing.bits, order)
    zeros = zeros.to(torch.int16) + packing.less
    if int(zeros.max()) > _MOST_ZERO:
        raise InvalidInputError(f"{name}.qzeros", int(zeros.max()), f"at most {_MOST_ZERO}")
    scales = tensors["scales"].float().T.contiguous()
    return Levels(levels.T.contiguous(), scales, zeros.T.to(torch.uint8).contiguous(), packing.bits, packing.group)


def stacked(parts: Sequence[Levels]) -> Levels:
    """The outputs of several weights of the same inputs, one after another."""
    levels, scales, zeros = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("levels", "scales", "zeros")
    )
    return Levels(levels, scales, zeros, parts[0].bits, parts[0].group)


def ordered(weight: Levels, order: torch.Tensor) -> Levels:
    """The outputs of `weight` at the places `order`, INT64 [outputs]."""
    return Levels(weight.levels[order], weight.scales[order], weight.zeros[order], weight.bits, weight.group)


def _unpacked(words: torch.Tensor, bits: int, order: Sequence[int]) -> torch.Tensor:
    """Levels UINT8 [rows, columns x levels of a word] of INT32 words [rows, columns]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    found = (words.int()[..., None] >> shifts) & ((1 << bits) - 1)
    places = torch.tensor(order).argsort()
    return found[..., places].flatten(1).to(torch.uint8)


def _require_order(name: str, groups: torch.Tensor, packing: Packing) -> None:
    inputs = len(groups)
    wanted = torch.arange(inputs) // (packing.group or inputs)
    if not torch.equal(groups.long(), wanted):
        place = int((groups.long() != wanted).nonzero()[0])
        raise InvalidInputError(
            f"{name}.g_idx", int(groups[place]), f"{int(wanted[place])} at input {place}: desc_act is not supported"
        )
