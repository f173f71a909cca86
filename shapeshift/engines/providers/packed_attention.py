"""Attention of a pack, as one operator of an exported graph: each text attends to itself.

On a GPU that has them it is torch's varlen kernels, which skip what lies between the texts; elsewhere
`scaled_dot_product_attention` with a mask, which computes it. The operator is known once this module is imported. The
varlen path ran on an H200.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

_AMPERE = (8, 0)
"""The least compute capability of FlashAttention."""
_WIDEST_HEAD, _HEAD_STEP = 256, 8


@torch.library.custom_op("shapeshift::packed_attention", mutates_args=())
def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    longest: int,
) -> torch.Tensor:
    """The attention of each text over itself, [tokens, heads, head_dim], without a wait for the device.

    query       [tokens, heads, head_dim]
    key, value  [tokens, kv_heads, head_dim]; heads is a multiple of kv_heads
    offsets     INT32 [texts + 1], ascending from 0 to `tokens`: text i has the tokens offsets[i] to offsets[i + 1]
    left, right tokens before and behind a token that it sees; -1: all
    longest     tokens that no text but the last has more of; 0: unknown. What the last has more is 0 or as computed
    """
    return attend(query, key, value, offsets, scale, left, right, longest, kernels_for(query))


Kernels = Callable[..., torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    longest: int,
    kernels: Kernels | None,
) -> torch.Tensor:
    """As the operator `packed_attention`, with torch's varlen kernels; None: with a mask."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    if kernels is None:
        return _masked(query, key, value, visible(offsets, len(query), left, right), scale)
    tokens = len(query)
    # The longest text's length is on the device. Programs are launched for so many tokens of each text.
    most = min(longest or tokens, tokens)
    outputs = kernels(query, key, value, offsets, offsets, most, most, scale=scale, window_size=(left, right))
    if most < tokens:
        # The last text is what no text uses, and may be longer.
        is_text = torch.arange(tokens, device=offsets.device) < offsets[-2]
        outputs = torch.where(is_text[:, None, None], outputs, torch.zeros_like(outputs))
    return outputs.contiguous()


@packed_attention.register_fake
def _(query: torch.Tensor, *_others: object) -> torch.Tensor:
    return query.new_empty(query.shape)


def kernels_for(query: torch.Tensor) -> Kernels | None:
    """torch's varlen kernels where they compute such queries: f16 or bf16, on a GPU of compute capability 8.0 on."""
    width = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if width > _WIDEST_HEAD or width % _HEAD_STEP or torch.cuda.get_device_capability(query.device) < _AMPERE:
        return None
    return varlen_kernels()


@functools.cache
def varlen_kernels() -> Kernels | None:
    """`torch.nn.attention.varlen.varlen_attn`; None where this torch has none that knows windows, or was built without
    FlashAttention."""
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    # It takes seconds to import.
    try:
        function: Kernels = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return function if "window_size" in inspect.signature(function).parameters else None


def offsets_of(segments: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The `offsets` of a pack, INT32 [rows + 2]: what no text uses is one more, so that nothing is left undefined.

    segments, rows: see `interfaces`.
    """
    numbers = torch.cat([rows, torch.zeros_like(rows[:1])])
    ends = (segments == numbers[:, None]).sum(1).cumsum(0)
    # A graph is captured with inputs that mean nothing.
    ends = ends.clamp(max=segments.shape[1])
    return torch.cat([torch.zeros_like(ends[:1]), ends]).to(torch.int32)


def visible(offsets: torch.Tensor, tokens: int, left: int, right: int) -> torch.Tensor:
    """Which tokens each token sees, BOOL [tokens, tokens]; see `packed_attention`."""
    places = torch.arange(tokens, device=offsets.device)
    text = torch.bucketize(places, offsets[1:].to(places.dtype), right=True)
    seen = text[:, None] == text[None, :]
    if left >= 0:
        seen &= places[:, None] - places[None, :] <= left
    if right >= 0:
        seen &= places[None, :] - places[:, None] <= right
    return seen


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    queries, keys, values = (one.transpose(0, 1)[None] for one in (query, key, value))
    outputs = scaled_dot_product_attention(queries, keys, values, attn_mask=seen[None, None], scale=scale)
    return outputs[0].transpose(0, 1).contiguous()
