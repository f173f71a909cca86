"""LoRA of many adapters in two grouped kernels a linear: x A for all tokens (shrink), then times B (expand).

In OpenAI's Triton, which torch for CUDA brings: `triton` here is that package. The idea is that of Punica's BGMV and
S-LoRA's MBGMV (Chen et al., 2023; Sheng et al., 2023): one kernel serves all adapters, whatever their ranks, and each
reads its factors where they lie in the pool. Here a program has a *tile* of up to 16 tokens of one adapter, so that the
tokens of a prompt read its factors once a tile. They ran on an H200; without a GPU tests
interpret them (`TRITON_INTERPRET=1`), against `grouped.add_terms`.

Shapes depend on numbers of tiles and tokens alone, so that CUDA graphs capture the kernels: which adapters there are,
their ranks, and where they lie are read from memory. A program without work returns at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from shapeshift.adapter_cache.lora.batch import FIELDS, PARTS
from shapeshift.adapter_cache.lora.grouped import TILE, TILE_FIELDS

_RANKS = 32
"""Ranks of a program of shrink, and of a turn of expand. Those beyond an adapter's rank are masked."""
_SPLITS = 4
"""Programs among which shrink divides the inputs of a tile: few tiles would leave most of a GPU idle."""
_INPUTS, _OUTPUTS = 128, 128
"""Inputs of a turn of shrink, outputs of a program of expand."""
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _shrink(
    inputs,
    memory,
    places,
    tiles,
    sums,
    width,
    row_stride,
    tokens,
    adapter_stride,
    most_ranks,
    parts: tl.constexpr,
    fields: tl.constexpr,
    tile_fields: tl.constexpr,
    tile_tokens: tl.constexpr,
    block_ranks: tl.constexpr,
    block_inputs: tl.constexpr,
    splits: tl.constexpr,
    widen: tl.constexpr,
):
    """sums[split, token, part, :] = a share of x A, FLOAT32 [splits, tokens, parts, most_ranks]."""
    tile = tl.program_id(0)
    blocks = most_ranks // block_ranks
    part, block, split = tl.program_id(1) // blocks, tl.program_id(1) % blocks, tl.program_id(2)
    adapter = tl.load(tiles + tile * tile_fields)
    if adapter < 0:
        return
    place = places + adapter.to(tl.int64) * adapter_stride + part * fields
    offset, rank = tl.load(place), tl.load(place + 1)
    if block * block_ranks >= rank:
        return
    indices = tl.load(tiles + tile * tile_fields + 1 + tl.arange(0, tile_tokens)).to(tl.int64)
    ranks = block * block_ranks + tl.arange(0, block_ranks)
    partial = tl.zeros((tile_tokens, block_ranks), tl.float32)
    for first in range(split * block_inputs, width, splits * block_inputs):
        columns = first + tl.arange(0, block_inputs)
        rows = tl.load(
            inputs + indices[:, None] * row_stride + columns[None, :],
            mask=(indices >= 0)[:, None] & (columns < width)[None, :],
            other=0.0,
        )
        factor = tl.load(
            memory + offset + ranks[None, :].to(tl.int64) * width + columns[:, None],
            mask=(ranks < rank)[None, :] & (columns < width)[:, None],
            other=0.0,
        )
        if widen:
            rows, factor = rows.to(tl.float32), factor.to(tl.float32)
        partial += tl.dot(rows, factor, input_precision="ieee")
    at = ((split * tokens + indices) * parts + part) * most_ranks
    tl.store(sums + at[:, None] + ranks[None, :], partial, mask=(indices >= 0)[:, None] & (ranks < rank)[None, :])


@triton.jit
def _expand(
    sums,
    memory,
    places,
    tiles,
    outputs,
    width,
    row_stride,
    tokens,
    adapter_stride,
    most_ranks,
    parts: tl.constexpr,
    fields: tl.constexpr,
    tile_fields: tl.constexpr,
    tile_tokens: tl.constexpr,
    block_ranks: tl.constexpr,
    block_outputs: tl.constexpr,
    splits: tl.constexpr,
):
    """outputs[token, first + n] += sum over splits of sums, times B[:, n]."""
    tile, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(tiles + tile * tile_fields)
    if adapter < 0:
        return
    place = places + adapter.to(tl.int64) * adapter_stride + part * fields
    offset, rank = tl.load(place), tl.load(place + 1)
    first, count = tl.load(place + 2), tl.load(place + 3)
    if rank == 0:
        return
    if block * block_outputs >= count:
        return
    indices = tl.load(tiles + tile * tile_fields + 1 + tl.arange(0, tile_tokens)).to(tl.int64)
    columns = block * block_outputs + tl.arange(0, block_outputs)
    term = tl.zeros((tile_tokens, block_outputs), tl.float32)
    for low in range(0, rank, block_ranks):
        ranks = low + tl.arange(0, block_ranks)
        is_there = (indices >= 0)[:, None] & (ranks < rank)[None, :]
        inner = tl.zeros((tile_tokens, block_ranks), tl.float32)
        for split in tl.static_range(splits):
            at = ((split * tokens + indices) * parts + part) * most_ranks
            inner += tl.load(sums + at[:, None] + ranks[None, :], mask=is_there, other=0.0)
        factor = tl.load(
            memory + offset + rank * width + ranks[:, None].to(tl.int64) * count + columns[None, :],
            mask=(ranks < rank)[:, None] & (columns < count)[None, :],
            other=0.0,
        )
        term += tl.dot(inner, factor.to(tl.float32), input_precision="ieee")
    target = outputs + indices[:, None] * row_stride + first + columns[None, :]
    mask = (indices >= 0)[:, None] & (columns < count)[None, :]
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (before + term).to(outputs.dtype.element_ty), mask=mask)


def add_terms(
    places: torch.Tensor,
    memory: torch.Tensor,
    tiles: torch.Tensor,
    most_ranks: int,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
) -> None:
    """See `grouped.AddTerms`. The device is not waited for."""
    assert inputs.stride(1) == outputs.stride(1) == 1 and inputs.dtype == outputs.dtype == memory.dtype
    tokens, width = inputs.shape
    ranks = -(-most_ranks // _RANKS) * _RANKS
    splits = min(_SPLITS, -(-width // _INPUTS))
    sums = torch.empty(splits, tokens, PARTS, ranks, dtype=torch.float32, device=inputs.device)
    shared: dict[str, Any] = {"parts": PARTS, "fields": FIELDS, "tile_fields": TILE_FIELDS, "tile_tokens": TILE}
    shared |= {"block_ranks": _RANKS, "splits": splits}
    sizes = (tokens, places.stride(0), ranks)
    grid = (len(tiles), PARTS * ranks // _RANKS, splits)
    # The interpreter multiplies the bits of bf16.
    turn = {"block_inputs": _INPUTS, "widen": _IS_INTERPRETED and inputs.dtype == torch.bfloat16}
    # On the device of the tensors, whichever is the thread's.
    with torch.cuda.device(inputs.get_device()):
        _shrink[grid](inputs, memory, places, tiles, sums, width, inputs.stride(0), *sizes, **turn, **shared)
        # The outputs of a part are not known here: as many as of the linear.
        grid = (len(tiles), PARTS, triton.cdiv(outputs.shape[1], _OUTPUTS))
        _expand[grid](
            sums, memory, places, tiles, outputs, width, outputs.stride(0), *sizes, block_outputs=_OUTPUTS, **shared
        )
