"""The linears of quantised checkpoints as levels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shapeshift.engines.gguf.tensors import GROUP, LEVELS
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.formats.packing import AWQ, GPTQ, MXFP4, SIGNED, WORD_BITS, WORDS, Packing
from shapeshift.kernels.levels import Levels
from shapeshift.settings import require

# The output of eight adjacent ones that each level of a word of AWQ belongs to, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MOST_ZERO = 255
# The values of the 4-bit floats of MXFP4, in halves. Two of them are a byte.
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_EXPONENT = 127
"""What MXFP4 adds to the exponent of a scale."""

Parts = Mapping[str, torch.Tensor]


def unpacked(linears: Mapping[str, Parts], packing: Packing) -> Levels:
    """The weights of linears of the same inputs, one after another, from the tensors of `Packing.parts`, by name.

    Raises InvalidInputError where inputs are not in the order of their groups, or a zero lies beyond all levels.
    """
    read = _READERS[packing.method]
    return Levels.stacked([read(name, tensors, packing) for name, tensors in linears.items()])


def of_blocks(parts: Sequence[tuple[str, torch.Tensor]]) -> Levels:
    """As `unpacked`, from the blocks of GGUF files: of each linear the type, and its blocks UINT8 [outputs, bytes]."""
    return Levels.stacked([_levels_of_blocks(kind, blocks) for kind, blocks in parts])


def scaled(numbers: torch.Tensor, scales: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:
    """Numbers in fp8 [outputs, inputs] times their scales: FLOAT32. blocks: see `Packing`."""
    factors = scales.float()
    if blocks:
        for dimension, block in enumerate(blocks):
            factors = factors.repeat_interleave(block, dim=dimension)
        factors = factors[: numbers.shape[0], : numbers.shape[1]]
    return numbers.float() * factors


def _levels_of_blocks(kind: str, blocks: torch.Tensor) -> Levels:
    """A block holds the scale in f16, with Q4_1 the minimum in f16, and the levels: of Q8_0 signed ones, else those of
    the first inputs in the low bits and those of the last ones in the high bits."""
    if kind == "MXFP4":
        pieces = blocks.view(blocks.shape[0], -1, 1 + GROUP // 2)
        exponents, halves = pieces[..., 0], pieces[..., 1:]
        return _of_floats(torch.cat([halves & 15, halves >> 4], dim=-1), exponents)
    bits, start = LEVELS[kind], 4 if kind == "Q4_1" else 2
    pieces = blocks.view(blocks.shape[0], -1, start + GROUP * bits // 8)
    numbers = pieces[..., :start].contiguous().view(torch.float16).float()
    levels = pieces[..., start:]
    levels = levels + 128 if bits == 8 else torch.cat([levels & 15, levels >> 4], dim=-1)
    scales = numbers[..., 0].contiguous()
    zero = {"Q8_0": 128, "Q4_0": 8, "Q4_1": 0}[kind]
    zeros = torch.full_like(scales, zero, dtype=torch.uint8)
    minima = numbers[..., 1].contiguous() if kind == "Q4_1" else None
    return Levels(levels.flatten(1).contiguous(), scales, zeros, bits, GROUP, minima)


def _of_words(name: str, tensors: Parts, packing: Packing) -> Levels:
    """Of AWQ and GPTQ."""
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


def _of_compressed(name: str, tensors: Parts, packing: Packing) -> Levels:
    """Of compressed-tensors: levels and zeros are signed, in words with half their range added."""
    half = 1 << (packing.bits - 1)
    scales = tensors["weight_scale"].float().contiguous()
    if packing.method == SIGNED:
        levels, *zeros = (
            (tensors[part].to(torch.int16) + half).to(torch.uint8)
            for part in ("weight", "weight_zero_point")
            if part in tensors
        )
    else:
        shape, whole = tensors["weight_shape"].tolist(), tensors["weight_packed"].shape[1] * packing.per_word
        require(shape == [len(scales), whole], f"{name}.weight_shape", shape, f"{[len(scales), whole]}, as the words")
        order = tuple(range(packing.per_word))
        levels = _unpacked(tensors["weight_packed"], packing.bits, order)
        point = tensors.get("weight_zero_point")
        zeros = [] if point is None else [_unpacked(point.T, packing.bits, order).T.contiguous()]
    middle = torch.full_like(scales, half, dtype=torch.uint8)
    return Levels(levels.contiguous(), scales, zeros[0] if zeros else middle, packing.bits, packing.group)


def _of_mxfp4(name: str, tensors: Parts, packing: Packing) -> Levels:
    blocks = tensors["blocks"]
    return _of_floats(torch.stack([blocks & 15, blocks >> 4], dim=-1), tensors["scales"])


def _of_floats(numbers: torch.Tensor, exponents: torch.Tensor) -> Levels:
    """Of MXFP4: 4-bit floats [outputs, groups, ...] and the exponents [outputs, groups] that they share."""
    table = torch.tensor(_HALVES, dtype=torch.int16) + 128
    scales = torch.ldexp(torch.full(exponents.shape, 0.5), exponents.int() - _EXPONENT)
    zeros = torch.full_like(scales, 128, dtype=torch.uint8)
    return Levels(table[numbers.flatten(1).int()].to(torch.uint8), scales, zeros, 8, GROUP)


def _unpacked(words: torch.Tensor, bits: int, order: Sequence[int]) -> torch.Tensor:
    """Levels UINT8 [rows, columns x levels of a word] of INT32 words [rows, columns]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    levels = (words.int()[..., None] >> shifts) & ((1 << bits) - 1)
    places = torch.tensor(order).argsort()
    return levels[..., places].flatten(1).to(torch.uint8)


def _require_order(name: str, groups: torch.Tensor, packing: Packing) -> None:
    inputs = len(groups)
    expected = torch.arange(inputs) // (packing.group or inputs)
    if not torch.equal(groups.long(), expected):
        place = int((groups.long() != expected).nonzero()[0])
        raise InvalidInputError(
            f"{name}.g_idx", int(groups[place]), f"{int(expected[place])} at input {place}: desc_act is not supported"
        )


_READERS: Mapping[str, Callable[[str, Parts, Packing], Levels]] = {
    AWQ: _of_words,
    GPTQ: _of_words,
    WORDS: _of_compressed,
    SIGNED: _of_compressed,
    MXFP4: _of_mxfp4,
}
