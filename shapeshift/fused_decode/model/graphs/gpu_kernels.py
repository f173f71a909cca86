"""Attention of rows of equal length over keys and values where they lie: in the blocks of the cache.

In OpenAI's Triton, which torch for CUDA brings: `triton` here is that package. Three kernels: `_place` normalises and
rotates queries and keys and writes keys and values into the cache; `_attend` reads them through the list of blocks of
each text, once for all heads that share them, with softmax over a running maximum; where few rows would leave most of a
GPU idle it divides the places among programs, and `_combine` adds up what they found (PagedAttention, Kwon et al.,
2023; FlashAttention and Flash-Decoding, Dao et al., 2022 and 2023). Sums are f32. Run on an H200; without a GPU
tests interpret them (`TRITON_INTERPRET=1`), against plain torch, and compile them for others.

Shapes depend on bounds alone, so that CUDA graphs capture the kernels: positions and blocks are read from memory. No
place behind a text's end is read, and a program without places returns at once. They run on the device of their
tensors, whichever is the thread's. What is compiled differs by layers and
between single tokens and chunks, split or not: steps of other sizes compile nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.graphs import row_kernels
from shapeshift.fused_decode.model.graphs.division import divide
from shapeshift.fused_decode.model.network import AttentionLayer
from shapeshift.fused_decode.model.torch_operations import Rows, StepKernels

_TURN_BYTES = 16384
"""Of the keys of a turn, and of its values: with two turns in flight, four times as much fits any GPU."""
_LEAST_TURN, _MOST_TURN, _STAGES = 16, 64, 2
_VECTORS = tl.constexpr(8)
"""Of a program of `_place`."""
_SPLITS = tl.constexpr(16)
"""Splits of a turn of `_combine`."""
_BLOCK_TOKENS = tl.constexpr(BLOCK_TOKENS)
# What differs from step to step: nothing is compiled for its size, or where it lies.
_NUMBERS = ["slot_stride", "position_stride", "text_stride", "length", "lines", "splits"]
_ADDRESSES = ["slots", "positions", "blocks"]
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ADDRESSES)
def _place(
    qkv,
    queries,
    keys,
    values,
    query_norm,
    key_norm,
    cosines,
    sines,
    slots,
    positions,
    blocks,
    token_stride,
    table_stride,
    slot_stride,
    position_stride,
    text_stride,
    block_stride,
    head_stride,
    length,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    padded: tl.constexpr,
    normed: tl.constexpr,
):
    """Some vectors of one token, as halves: queries to `queries` [tokens, heads, head_dim], the others to the cache."""
    token = tl.program_id(0).to(tl.int64)
    row = token // length
    position = tl.load(positions + row * position_stride + token % length)
    head = tl.program_id(1) * _VECTORS + tl.arange(0, _VECTORS)
    is_query, is_value = head < heads, (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    is_key = (head >= heads) & (head < heads + kv_heads)
    lane = tl.arange(0, padded)[None, :]
    in_half = lane < half
    is_there = (head < heads + 2 * kv_heads)[:, None] & in_half
    source = qkv + token * token_stride + head[:, None] * 2 * half + lane
    first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_there, other=0.0).to(tl.float32)
    is_turned = (is_query | is_key)[:, None]
    if normed:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        factor = tl.where(is_turned, 1.0 / tl.sqrt(squares / (2 * half) + eps), 1.0)
        norm = tl.where(is_query[:, None], query_norm, key_norm) + lane
        first *= factor * tl.load(norm, mask=is_turned & in_half, other=1.0)
        second *= factor * tl.load(norm + half, mask=is_turned & in_half, other=1.0)
    angle = tl.load(slots + row * slot_stride) * table_stride + position * half + lane
    cosine = tl.load(cosines + angle, mask=in_half, other=1.0)
    sine = tl.load(sines + angle, mask=in_half, other=0.0)
    turned, other = first * cosine - second * sine, second * cosine + first * sine
    number = keys.dtype.element_ty
    first, second = tl.where(is_turned, turned, first).to(number), tl.where(is_turned, other, second).to(number)
    target = queries + (token * heads + head[:, None]) * 2 * half + lane
    tl.store(target, first, mask=is_query[:, None] & in_half)
    tl.store(target + half, second, mask=is_query[:, None] & in_half)
    block = tl.load(blocks + row * text_stride + position // _BLOCK_TOKENS)
    kv_head = tl.where(is_key, head - heads, head - heads - kv_heads)[:, None]
    place = block * block_stride + kv_head * head_stride + position % _BLOCK_TOKENS * 2 * half + lane
    tl.store(keys + place, first, mask=is_key[:, None] & in_half)
    tl.store(keys + place + half, second, mask=is_key[:, None] & in_half)
    tl.store(values + place, first, mask=is_value[:, None] & in_half)
    tl.store(values + place + half, second, mask=is_value[:, None] & in_half)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ADDRESSES)
def _attend(
    queries,
    keys,
    values,
    positions,
    blocks,
    mixed,
    logs,
    position_stride,
    text_stride,
    block_stride,
    head_stride,
    mixed_stride,
    length,
    lines,
    splits,
    scale,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    own_queries: tl.constexpr,
    lanes: tl.constexpr,
    turn: tl.constexpr,
    is_split: tl.constexpr,
    window: tl.constexpr,
    score_cap: tl.constexpr,
    widen: tl.constexpr,
):
    """The attention of a tile of queries over a split of the places that it sees.

    A line is a head of a token. With one split, `mixed` is the result [tokens, heads head_dim]; with several it is
    FLOAT32 [splits, lines, head_dim], and `logs` FLOAT32 [splits, lines] the logarithms of the sums of each.
    """
    tiles = tl.cdiv(length, own_queries)
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, lanes)
    query = tile * own_queries + lane // group
    is_there = (lane < own_queries * group) & (query < length)
    position = tl.load(positions + row * position_stride + query, mask=is_there, other=-1)
    end = tl.max(position, 0) + 1
    least = end * 0
    if window > 0:
        least = tl.maximum(tl.min(tl.where(is_there, position, end), 0) - window + 1, 0)
    share = tl.cdiv(tl.cdiv(end - least, splits), turn) * turn
    first = least + split * share
    head = kv_head * group + lane % group
    token = row * length + query
    line = token * (tl.num_programs(1) * group) + head
    # Not joined by `and`: the first is decided when it is compiled.
    if is_split:  # noqa: SIM102
        if first >= end:
            tl.store(logs + split.to(tl.int64) * lines + line, tl.full((lanes,), float("-inf"), tl.float32), is_there)
            return
    element = tl.arange(0, width)
    in_head = element < head_dim
    vectors = tl.load(
        queries + line[:, None] * head_dim + element[None, :], mask=is_there[:, None] & in_head[None, :], other=0.0
    )
    if widen:
        vectors = vectors.to(tl.float32)
    most = tl.full((lanes,), float("-inf"), tl.float32)
    total = tl.zeros((lanes,), tl.float32)
    mix = tl.zeros((lanes, width), tl.float32)
    for start in range(first, tl.minimum(first + share, end), turn):
        place = start + tl.arange(0, turn)
        is_text = place < end
        block = tl.load(blocks + row * text_stride + place // _BLOCK_TOKENS, mask=is_text, other=0)
        vector = block * block_stride + kv_head * head_stride + place % _BLOCK_TOKENS * head_dim
        held = is_text[:, None] & in_head[None, :]
        key = tl.load(keys + vector[:, None] + element[None, :], mask=held, other=0.0)
        value = tl.load(values + vector[:, None] + element[None, :], mask=held, other=0.0)
        if widen:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(vectors, tl.trans(key), input_precision="ieee") * scale
        if score_cap > 0:
            # c tanh(x / c).
            scores = score_cap - 2 * score_cap / (tl.exp(scores * (2 / score_cap)) + 1)
        is_seen = place[None, :] <= position[:, None]
        if window > 0:
            is_seen &= place[None, :] > position[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        # A query of the tile may see no place of these.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        decay, weights = tl.exp(most - base), tl.exp(scores - base[:, None])
        total = total * decay + tl.sum(weights, 1)
        mix = mix * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        most = highest
    # 0 where a query saw no place.
    total = tl.where(total == 0.0, 1.0, total)
    mix /= total[:, None]
    if is_split:
        target = mixed + (split.to(tl.int64) * lines + line)[:, None] * head_dim + element[None, :]
        tl.store(logs + split.to(tl.int64) * lines + line, most + tl.log(total), mask=is_there)
    else:
        target = mixed + token[:, None] * mixed_stride + head[:, None] * head_dim + element[None, :]
    tl.store(target, mix.to(mixed.dtype.element_ty), mask=is_there[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=_NUMBERS)
def _combine(
    parts,
    logs,
    mixed,
    mixed_stride,
    lines,
    splits,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    most_splits: tl.constexpr,
):
    """One line of `mixed` [tokens, heads head_dim] from what the splits gave for it."""
    line = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, most_splits)
    sums = tl.load(logs + every * lines + line, mask=every < splits, other=float("-inf"))
    most = tl.max(sums, 0)
    total = tl.sum(tl.exp(sums - most), 0)
    element = tl.arange(0, width)
    in_head = element < head_dim
    mix = tl.zeros((width,), tl.float32)
    for low in range(0, splits, _SPLITS):
        split = low + tl.arange(0, _SPLITS)
        log = tl.load(logs + split * lines + line, mask=split < splits, other=float("-inf"))
        # What a program without places has left of `parts` is not read.
        part = tl.load(
            parts + (split * lines + line)[:, None] * head_dim + element[None, :],
            mask=(log != float("-inf"))[:, None] & in_head[None, :],
            other=0.0,
        )
        mix += tl.sum(part * tl.exp(log - most)[:, None], 0)
    target = mixed + line // heads * mixed_stride + line % heads * head_dim + element
    tl.store(target, (mix / total).to(mixed.dtype.element_ty), mask=in_head)


def write(qkv: torch.Tensor, layer: AttentionLayer, rows: Rows) -> torch.Tensor:
    """See `StepKernels.write`. Queries have the dtype of the cache: [tokens, heads, head_dim]."""
    keys, slots, positions, blocks = layer.keys, rows.slots, rows.positions, rows.blocks
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    heads, half = qkv.shape[1] // head_dim - 2 * kv_heads, head_dim // 2
    assert qkv.stride(1) == blocks.stride(1) == positions.stride(1) == 1 and layer.key_scales is None
    assert keys.stride() == layer.values.stride() and keys.stride()[2:] == (head_dim, 1)
    assert layer.cosines.stride() == layer.sines.stride() and layer.cosines.stride()[1:] == (half, 1)
    assert (layer.query_norm is None) == (layer.key_norm is None)
    queries = torch.empty(len(qkv), heads, head_dim, dtype=keys.dtype, device=qkv.device)
    constants = {"heads": heads, "kv_heads": kv_heads, "half": half, "padded": triton.next_power_of_2(half)}
    with torch.cuda.device(qkv.get_device()):
        _place[(len(qkv), triton.cdiv(heads + 2 * kv_heads, _VECTORS.value))](
            *(qkv, queries, keys, layer.values, layer.query_norm, layer.key_norm, layer.cosines, layer.sines),
            *(slots, positions, blocks, qkv.stride(0), layer.cosines.stride(0)),
            *(slots.stride(0), positions.stride(0), blocks.stride(0), keys.stride(0), keys.stride(1)),
            *(positions.shape[1], layer.eps),
            **constants,
            normed=layer.query_norm is not None,
        )
    return queries


def read(queries: torch.Tensor, layer: AttentionLayer, rows: Rows, mixed: torch.Tensor) -> None:
    """See `StepKernels.read`."""
    tokens, heads, head_dim = queries.shape
    keys, positions, blocks = layer.keys, rows.positions, rows.blocks
    (count, length), kv_heads = positions.shape, keys.shape[1]
    division = divide(count, length, blocks.shape[1] * BLOCK_TOKENS, heads, kv_heads, head_dim, layer.window)
    width, lines = max(16, triton.next_power_of_2(head_dim)), tokens * heads
    parts = logs = mixed
    if division.splits > 1:
        parts = torch.empty(division.splits, lines, head_dim, dtype=torch.float32, device=mixed.device)
        logs = torch.empty(division.splits, lines, dtype=torch.float32, device=mixed.device)
    turn = min(max(_TURN_BYTES // (width * keys.element_size()), _LEAST_TURN), _MOST_TURN)
    # The interpreter multiplies the bits of bf16.
    constants = {"turn": turn, "widen": _IS_INTERPRETED and keys.dtype == torch.bfloat16, "lanes": division.lanes}
    constants |= {"own_queries": division.queries, "is_split": division.splits > 1, "group": heads // kv_heads}
    shared = {"head_dim": head_dim, "width": width}
    with torch.cuda.device(mixed.get_device()):
        _attend[(count * division.tiles, kv_heads, division.splits)](
            *(queries, keys, layer.values, positions, blocks, parts, logs),
            *(positions.stride(0), blocks.stride(0), keys.stride(0), keys.stride(1), mixed.stride(0)),
            *(length, lines, division.splits, layer.scale),
            **constants,
            **shared,
            window=layer.window,
            score_cap=layer.score_cap,
            num_stages=_STAGES,
        )
        if division.splits > 1:
            most = max(_SPLITS.value, triton.next_power_of_2(division.splits))
            sizes = (mixed.stride(0), lines, division.splits)
            _combine[(lines,)](parts, logs, mixed, *sizes, **shared, heads=heads, most_splits=most)


KERNELS = StepKernels("triton", write, read, row_kernels.add_norm, row_kernels.gate)
