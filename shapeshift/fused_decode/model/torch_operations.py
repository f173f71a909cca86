"""The decode step in torch: what needs no compiler, the reference of the native operations, and the steps of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch
from shapeshift.fused_decode.model.network import AttentionLayer, DeltaLayer, Network
from shapeshift.fused_decode.model.quantised import quantise_rows

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": lambda values: functional.relu(values).square(),
    "tanh": torch.tanh,
}


class PlainLinear:
    """`torch.nn.functional.linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self._weight, self._bias)


@dataclass(frozen=True)
class Rows:
    """Rows of equal length, computed together.

    tokens     their places in the batch: INT64 [rows length], or a slice where they lie side by side
    positions  INT64 [rows, length]  places in the text
    slots      INT64 [rows]
    blocks     INT64 [rows, n]       the blocks of each text
    """

    tokens: torch.Tensor | slice
    positions: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True)
class StepKernels:
    """What a step computes beside its linears. On a GPU none of it waits for the device.

    name   for the log
    write  write(qkv, layer, rows): normalise and rotate queries and keys of `qkv`, the tokens of the rows [tokens,
           (heads + 2 kv_heads) head_dim], and write keys and values into the cache. Returns the queries as `read` wants
           them
    read   read(queries, layer, rows, mixed): the attention of these queries over their texts, to `mixed` [tokens, heads
           head_dim]
    add_norm  see `network.Operations`
    gate   of `network.Operations.activate`: SiLU, gated
    """

    name: str
    write: Callable[[torch.Tensor, AttentionLayer, Rows], torch.Tensor]
    read: Callable[[torch.Tensor, AttentionLayer, Rows, torch.Tensor], None]
    add_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float, torch.dtype], torch.Tensor]
    gate: Callable[[torch.Tensor], torch.Tensor]


class TorchOperations:
    """See `network.Operations`: by `kernels`, which are those of a GPU or `PLAIN`. A plan is a sequence of `Rows`."""

    def __init__(self, device: torch.device | str = "cpu", kernels: StepKernels | None = None) -> None:
        """kernels: None: `PLAIN`, against which the native operations are tested."""
        self._device = device
        self._kernels = kernels or PLAIN
        self.name = self._kernels.name
        self.add_norm = self._kernels.add_norm

    def plan(self, batch: StepBatch, *kv_heads: int) -> list[Rows]:
        assert batch.blocks is not None
        lengths, starts = batch.lengths.long(), batch.starts.long()
        firsts = lengths.cumsum(0) - lengths
        groups = []
        for length in sorted(set(lengths.tolist())):
            rows = (lengths == length).nonzero()[:, 0]
            steps = torch.arange(length)
            positions = starts[rows, None] + steps
            blocks = batch.blocks[rows, : int(positions.max()) // BLOCK_TOKENS + 1].long()
            places = (firsts[rows, None] + steps).flatten(), positions, batch.slots[rows].long(), blocks
            groups.append(Rows(*(place.to(self._device) for place in places)))
        return groups

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Sequence[Rows]) -> torch.Tensor:
        _, kv_heads, _, head_dim = layer.keys.shape
        width = qkv.shape[1] - 2 * kv_heads * head_dim
        gates = None
        if layer.gated:
            width //= 2
            qkv, gates = qkv[:, :-width], qkv[:, -width:].float()
        mixed = qkv.new_empty(len(qkv), width)
        # All are written before any is read: what fills the rows of a graph may be a token of its chunk.
        queries = [self._kernels.write(qkv[rows.tokens], layer, rows) for rows in plan]
        for query, rows in zip(queries, plan, strict=True):
            part = mixed[rows.tokens]
            self._kernels.read(query, layer, rows, part)
            if not isinstance(rows.tokens, slice):
                mixed[rows.tokens] = part
        return mixed if gates is None else (mixed * gates.sigmoid()).to(mixed.dtype)

    def delta_net(
        self, inputs: torch.Tensor, shares: torch.Tensor, layer: DeltaLayer, runs: torch.Tensor
    ) -> torch.Tensor:
        out = inputs.new_empty(len(inputs), layer.state.shape[1] * layer.state.shape[3])
        for slot, position, first, count, replayed in runs.tolist():
            if position == 0:
                layer.window[slot], layer.state[slot] = 0.0, 0.0
            for token in range(first, first + count):
                keeps = bool(replayed) and token == first
                out[token] = _delta_rule(inputs[token].float(), shares[token], layer, slot, position, keeps)
                position += 1
        return out

    def activate(self, both: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        if gated and activation == "silu":
            return self._kernels.gate(both)
        first, *others = both.float().chunk(2, dim=-1) if gated else (both.float(),)
        inner = _ACTIVATIONS[activation](first)
        return (inner * others[0] if others else inner).to(both.dtype)

    def fused_forward(self, network: Network) -> None:
        return None


def _delta_rule(
    inputs: torch.Tensor, shares: torch.Tensor, layer: DeltaLayer, slot: int, position: int, keeps: bool
) -> torch.Tensor:
    """The delta net's output for the token at `position` of the text in `slot`; keeps: its state has this token."""
    window, state, kernel = layer.window[slot], layer.state[slot], len(layer.weight)
    heads, depth, width = state.shape
    mixed, gate = torch.split(inputs, [window.shape[1], heads * width])
    window[position % kernel] = mixed
    places = (torch.arange(position - kernel + 1, position + 1) + kernel) % kernel
    mixed = functional.silu((window[places] * layer.weight).sum(dim=0))
    queries, keys, values = torch.split(mixed, [(len(mixed) - heads * width) // 2] * 2 + [heads * width])
    query, key = (
        (one * torch.rsqrt(one.square().sum(dim=-1, keepdim=True) + 1e-6)).repeat_interleave(heads // len(one), dim=0)
        for one in (queries.view(-1, depth), keys.view(-1, depth))
    )
    if not keeps:
        taken, stays = shares.view(2, heads)
        state *= (layer.decay * functional.softplus(stays + layer.bias)).exp()[:, None, None]
        fresh = (values.view(heads, width) - (state * key[..., None]).sum(dim=1)) * taken.sigmoid()[:, None]
        state += key[..., None] * fresh[:, None]
    out = (state * query[..., None]).sum(dim=1) * depth**-0.5
    return functional.rms_norm(out, (width,), layer.norm, layer.eps).flatten() * functional.silu(gate)


def add_norm(
    state: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """See `network.Operations.add_norm`."""
    if delta is not None:
        state += delta
    return functional.rms_norm(state, weight.shape, weight, eps).to(dtype)


def gate(both: torch.Tensor) -> torch.Tensor:
    """See `StepKernels.gate`."""
    first, second = both.float().chunk(2, dim=-1)
    return (functional.silu(first) * second).to(both.dtype)


def norm_heads(vectors: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm of each head's vector, [..., head_dim]; unchanged without a weight."""
    return vectors if weight is None else functional.rms_norm(vectors, weight.shape, weight, eps)


def rotate(vectors: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Vectors [rows, length, heads, head_dim], turned to their positions [rows, length] of their slots [rows, 1]."""
    cosines, sines = layer.cosines[slots, positions][:, :, None], layer.sines[slots, positions][:, :, None]
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def place(
    vectors: torch.Tensor,
    norm: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layer: AttentionLayer,
) -> torch.Tensor:
    """As `rotate`, with the norm of the layer before or after it."""
    if layer.norm_last:
        return norm_heads(rotate(vectors, slots, positions, layer), norm, layer.eps)
    return rotate(norm_heads(vectors, norm, layer.eps), slots, positions, layer)


def store(
    vectors: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    positions: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write vectors [rows, length, kv_heads, head_dim] into the cache, at positions [rows, length] of texts with these
    blocks [rows, n]; with `scales`, of the cache, in levels."""
    block, places = blocks.gather(1, positions // BLOCK_TOKENS), positions % BLOCK_TOKENS
    if scales is not None:
        vectors, factors = quantise_rows(vectors)
        scales[block, :, places] = factors[..., 0]
    cache[block, :, places] = vectors.to(cache.dtype)


def gather(
    cache: torch.Tensor, blocks: torch.Tensor, seen: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """The part of the cache that texts with these blocks [rows, n] have: [rows, kv_heads, n BLOCK_TOKENS, head_dim].

    What no token has seen (BOOL [rows, length, n BLOCK_TOKENS]) is 0: it may hold NaN, and a mask does not make that 0.
    """
    parts = cache[blocks] if scales is None else cache[blocks] * scales[blocks][..., None]
    parts = parts.transpose(1, 2).flatten(2, 3)
    return parts.masked_fill(~seen.any(dim=1)[:, None, :, None], 0.0)


def visible(layer: AttentionLayer, positions: torch.Tensor, context: int) -> torch.Tensor:
    """BOOL [rows, length, context]: the places that tokens at positions [rows, length] attend to."""
    places = torch.arange(context, device=positions.device)
    seen = places <= positions[:, :, None]
    if layer.window:
        newest = positions[:, :, None]
        seen &= places >= newest // layer.window * layer.window if layer.chunked else places > newest - layer.window
    return seen


def _write(qkv: torch.Tensor, layer: AttentionLayer, rows: Rows) -> torch.Tensor:
    """See `StepKernels.write`; queries [rows, heads, length, head_dim]."""
    kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    parts = qkv.float().view(*rows.positions.shape, -1, head_dim)
    query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], dim=2)
    slots = rows.slots[:, None]
    query = place(query, layer.query_norm, slots, rows.positions, layer)
    key = place(key, layer.key_norm, slots, rows.positions, layer)
    store(key, layer.keys, rows.blocks, rows.positions, layer.key_scales)
    store(value, layer.values, rows.blocks, rows.positions, layer.value_scales)
    return query.transpose(1, 2)


def _read(query: torch.Tensor, layer: AttentionLayer, rows: Rows, mixed: torch.Tensor) -> None:
    """See `StepKernels.read`: over a copy of the keys and values of all places."""
    seen = visible(layer, rows.positions, rows.blocks.shape[1] * BLOCK_TOKENS)
    caches = ((layer.keys, layer.key_scales), (layer.values, layer.value_scales))
    keys, values = (gather(cache, rows.blocks, seen, scales) for cache, scales in caches)
    # A GPU multiplies numbers of 16 bits faster; on a CPU arithmetic is f32.
    if not keys.is_cuda:
        keys, values = keys.float(), values.float()
    heads = mix(query.to(keys.dtype), keys, values, seen[:, None], layer)
    mixed.copy_(heads.transpose(1, 2).flatten(2).flatten(0, 1))


def mix(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer
) -> torch.Tensor:
    """Softmax attention of queries [rows, heads, length, head_dim] over what each has `seen`, BOOL [rows, 1, length,
    context]."""
    if not layer.score_cap and layer.sinks is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=layer.scale, enable_gqa=True
        )
    keys, values = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (keys, values))
    scores = (query @ keys.transpose(2, 3)).float() * layer.scale
    if layer.score_cap:
        scores = torch.tanh(scores / layer.score_cap) * layer.score_cap
    scores = scores.masked_fill(~seen, float("-inf"))
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype) @ values


PLAIN = StepKernels("torch", _write, _read, add_norm, gate)
