"""A decoder as linears, norms and embedding, its forward pass, and the operations that this is made of.

`architecture` describes what the layers are; `native_operations` computes, and without a compiler `torch_operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from shapeshift.fused_decode.interfaces import DOWN, GATE_UP, OUTPUT, QKV, LinearDelta, LowRank, StepBatch
from shapeshift.fused_decode.model.architecture import Architecture

Linear = Callable[[torch.Tensor], torch.Tensor]
"""From [tokens, inputs] to [tokens, outputs], of the weights' dtype."""
FusedForward = Callable[[StepBatch, LowRank | None], torch.Tensor]
"""From a batch with blocks and the low-rank terms of the linears to logits that are valid until the next call; it does
what `StepBatch.draws` says."""
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu2", "tanh")


@dataclass(frozen=True)
class AttentionLayer:
    """The tensors of one layer's attention.

    keys, values          the cache, f32, bf16 or INT8 [blocks, kv_heads, BLOCK_TOKENS, head_dim]
    cosines, sines        FLOAT32 [slots, max_length, head_dim / 2], see `kv_cache.RopeTables`
    query_norm, key_norm  FLOAT32 [head_dim], RMS norm of each head's vector, or None
    window                number of latest tokens that each token attends to, itself included; 0: all
    scale                 of the scores
    score_cap             c: a score x becomes c tanh(x / c); 0: it stays
    key_scales, value_scales  FLOAT32 [blocks, kv_heads, BLOCK_TOKENS] of an INT8 cache, or None
    sinks                 FLOAT32 [heads], a score that each query of a head has beside those of its keys, or None
    norm_last             the norms of queries and keys come after the rotation
    chunked               each token attends to those of its own chunk of `window` tokens alone
    gated                 whether each head's output is multiplied by the sigmoid of its gate
    """

    keys: torch.Tensor
    values: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    eps: float
    window: int
    scale: float
    score_cap: float
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    norm_last: bool = False
    chunked: bool = False
    gated: bool = False


@dataclass(frozen=True)
class DeltaLayer:
    """The tensors of one layer of a gated delta net, FLOAT32.

    shares  of rows in f32, to [tokens, 2 heads]: how much of a new value is taken, and what the state keeps, before
            their functions
    weight  [kernel, channels] of the convolution, the oldest token first
    decay   [heads], below 0
    bias    [heads]
    norm    [value_dim], of each head's output
    window, state  see `kv_cache.States`
    """

    shares: Linear
    weight: torch.Tensor
    decay: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    window: torch.Tensor
    state: torch.Tensor


class Operations(Protocol):
    """Kernels over contiguous tensors. Arithmetic is f32 for every storage type."""

    name: str

    def plan(self, batch: StepBatch, *kv_heads: int) -> Any:
        """The `plan` argument of `attention`, for all layers of one step; kv_heads: those that layers have."""
        ...

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        """Normalise and rotate queries and keys, write keys and values to the cache, attend causally.

        `qkv` is [tokens, (heads + 2 kv_heads) head_dim]: queries, keys, values; then gates of the heads, where the
        layer has some. Returns [tokens, heads head_dim].
        """
        ...

    def delta_net(
        self, inputs: torch.Tensor, shares: torch.Tensor, layer: DeltaLayer, runs: torch.Tensor
    ) -> torch.Tensor:
        """What a delta net makes of the rows whose `runs` are those of `kv_cache.States.advance`.

        inputs: [tokens, channels + values]: queries, keys and values before the convolution, and gates of the outputs.
        shares: FLOAT32 [tokens, 2 heads]. Returns [tokens, values], of the type of `inputs`.
        """
        ...

    def add_norm(
        self, state: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Add `delta` (of `dtype`) to `state`, FLOAT32 [tokens, hidden], in place; its RMS norm as `dtype`."""
        ...

    def activate(self, both: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        """The activation, one of ACTIVATIONS, of each element; gated: of the first half of each row, times its second
        half: [tokens, 2 width] to [tokens, width]."""
        ...

    def fused_forward(self, network: Network) -> FusedForward | None:
        """The forward pass of `network` as one operation; None where there is none."""
        ...


@dataclass(frozen=True)
class Norm:
    """RMS norm; with a bias, layer norm. Weight and bias are f32."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The norm of rows of any dtype, in f32."""
        if self.bias is None:
            return functional.rms_norm(rows.float(), self.weight.shape, self.weight, self.eps)
        return functional.layer_norm(rows.float(), self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class Beside:
    """The norms of a layer with an MLP and experts: after the MLP, before the experts and after them."""

    mlp_end: Norm
    norm: Norm
    end: Norm


@dataclass(frozen=True)
class LayerInput:
    """What a layer makes of its own input of each token, after its branches: an MLP whose inner rows it multiplies."""

    gate: Linear
    projection: Linear
    norm: Norm


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of all layers: rows of `table`, and what `projection` makes of the first state.

    table  [vocab_size, layers width], scaled as the architecture says
    norm   of the projection's rows for a layer
    """

    table: torch.Tensor
    projection: Linear
    norm: Norm

    def __call__(self, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """FLOAT32 [tokens, layers, width]."""
        shape = len(tokens), -1, self.norm.weight.shape[0]
        rows = functional.embedding(tokens, self.table).float().view(shape)
        projected = self.projection(state.to(self.table.dtype)).float() * state.shape[1] ** -0.5
        return (self.norm(projected.view(shape)) + rows) * 2**-0.5


@dataclass(frozen=True)
class Layer:
    """One decoder layer: one linear for q, k and v, one for gate and up, norms before and after each branch.

    experts    of rows and of what their router reads; without `beside` in place of gate_up and down, which are None
    kv_layer   see `Architecture.kv_layer`; qkv then gives queries alone
    scale      of the state in the end
    row_norms: of all queries and of all keys of a token; None where the model has none.
    query_scales: FLOAT32 [max_length], factors of the queries at each position; None: all are 1
    """

    attention_norm: Norm | None
    qkv: Linear
    row_norms: tuple[Norm, Norm] | None
    attention: AttentionLayer | DeltaLayer
    output: Linear
    attention_end: Norm | None
    mlp_norm: Norm | None
    gate_up: Linear | None
    down: Linear | None
    mlp_end: Norm | None
    experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    query_scales: torch.Tensor | None = None
    kv_layer: int = -1
    beside: Beside | None = None
    input: LayerInput | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Network:
    """The residual state is f32; linears, cache and `embedding` [vocab_size, hidden] share one dtype.

    embedding  scaled as the architecture says
    positions  FLOAT32 [max_length, hidden], learned; None without
    """

    architecture: Architecture
    embedding: torch.Tensor
    positions: torch.Tensor | None
    layers: list[Layer]
    norm: Norm
    head: Linear
    inputs: LayerInputs | None = None

    @property
    def is_one_operation(self) -> bool:
        """See `Architecture.is_one_operation`; texts may be too short for what it leaves out."""
        scaled = any(layer.query_scales is not None for layer in self.layers)
        return self.architecture.is_one_operation and not scaled

    def forward(
        self,
        operations: Operations,
        tokens: torch.Tensor,
        places: torch.Tensor,
        plan: Any,
        last: torch.Tensor,
        linear_delta: LinearDelta | None = None,
        runs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits FLOAT32 [wanted, vocab_size] after the tokens at `last`, INT64 [wanted] places in `tokens`.

        places: the place of each token in its text, INT64 [tokens]. runs: of layers with states, see
        `kv_cache.States.advance`.
        """
        a = self.architecture
        state = functional.embedding(tokens, self.embedding).float()
        if self.positions is not None:
            state += self.positions[places]
        inputs = None if self.inputs is None else self.inputs(tokens, state)
        delta: torch.Tensor | None = None
        shared: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            normed = self._enter(operations, state, delta, layer.attention_norm)
            qkv = apply(layer.qkv, normed, linear_delta, index, QKV)
            if layer.query_scales is not None:
                qkv[:, : a.layer(index).query_width] *= layer.query_scales[places, None]
            if layer.kv_layer >= 0:
                # What that layer wrote is written once more.
                qkv = torch.cat([qkv, shared[layer.kv_layer]], dim=1)
            elif a.value_norm:
                assert isinstance(layer.attention, AttentionLayer)
                shared[index] = self._keys_and_values(layer.attention, qkv)
            if isinstance(layer.attention, DeltaLayer):
                assert runs is not None
                mixed = operations.delta_net(qkv, layer.attention.shares(normed.float()), layer.attention, runs)
            else:
                mixed = self._attend(operations, layer, layer.attention, qkv, plan)
            if layer is self.layers[-1]:
                # After the last attention, only the wanted tokens matter.
                if last.shape[0] == 0:
                    return state.new_empty(0, a.vocab_size)
                state, mixed = state[last], mixed[last]
                inputs = None if inputs is None else inputs[last]
                linear_delta = None if linear_delta is None else linear_delta.subset(last)
            attended = self._leave(apply(layer.output, mixed, linear_delta, index, OUTPUT), layer.attention_end)
            normed = self._enter(operations, state, None if a.parallel else attended, layer.mlp_norm)
            delta = self._leave(self._mlp(operations, layer, state, normed, linear_delta, index), layer.mlp_end)
            if a.parallel:
                delta = delta + attended
            if layer.input is not None:
                assert inputs is not None, "a network without the inputs of its layers"
                state += delta
                delta = self._take(operations, layer.input, state, inputs[:, index])
            if layer.scale != 1:
                state = (state + delta) * layer.scale
                delta = None
        logits = self.head(self._enter(operations, state, delta, self.norm)).float() * a.logit_scale
        return operations.activate(logits / a.logit_cap, "tanh", False) * a.logit_cap if a.logit_cap else logits

    def _enter(
        self, operations: Operations, state: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        """Add `delta` to `state`, in place; what a branch gets of it, in the dtype of the linears."""
        dtype = self.embedding.dtype
        if norm is not None and norm.bias is None:
            return operations.add_norm(state, delta, norm.weight, norm.eps, dtype)
        if delta is not None:
            state += delta
        return (state if norm is None else norm(state)).to(dtype)

    def _leave(self, out: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """What a branch adds to the state, of its last linear's outputs."""
        if norm is not None:
            out = norm(out).to(out.dtype)
        return out if self.architecture.branch_scale == 1 else out * self.architecture.branch_scale

    def _keys_and_values(self, layer: AttentionLayer, qkv: torch.Tensor) -> torch.Tensor:
        """The keys and values in `qkv`, of which the values are normalised there."""
        _, kv_heads, _, head_dim = layer.keys.shape
        values = qkv[:, -kv_heads * head_dim :].view(len(qkv), kv_heads, head_dim)
        values.copy_(functional.rms_norm(values.float(), (head_dim,), eps=layer.eps))
        return qkv[:, -2 * kv_heads * head_dim :]

    def _take(self, operations: Operations, layer: LayerInput, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What a layer adds to its state for its input `rows`."""
        dtype = self.embedding.dtype
        both = torch.cat([layer.gate(state.to(dtype)).float(), rows], dim=1)
        inner = operations.activate(both, self.architecture.activation, True)
        return self._leave(layer.projection(inner.to(dtype)), layer.norm)

    def _attend(
        self, operations: Operations, layer: Layer, attention: AttentionLayer, qkv: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        if layer.row_norms is not None:
            queries, keys = (norm.weight.shape[0] for norm in layer.row_norms)
            for rows, norm in zip((qkv[:, :queries], qkv[:, queries : queries + keys]), layer.row_norms, strict=True):
                rows.copy_(norm(rows))
        return operations.attention(qkv, attention, plan)

    def _mlp(
        self,
        operations: Operations,
        layer: Layer,
        state: torch.Tensor,
        normed: torch.Tensor,
        linear_delta: LinearDelta | None,
        index: int,
    ) -> torch.Tensor:
        if layer.experts is not None and layer.beside is None:
            return layer.experts(normed, normed)
        assert layer.gate_up is not None and layer.down is not None, "a layer has an MLP or experts"
        both = apply(layer.gate_up, normed, linear_delta, index, GATE_UP)
        inner = operations.activate(both, self.architecture.activation, self.architecture.gated)
        out = apply(layer.down, inner, linear_delta, index, DOWN)
        if layer.experts is None or layer.beside is None:
            return out
        rows = layer.beside.norm(state).to(normed.dtype)
        scored = functional.rms_norm(state, state.shape[1:], eps=layer.beside.norm.eps)
        mixed = layer.beside.end(layer.experts(rows, scored))
        return (layer.beside.mlp_end(out) + mixed).to(out.dtype)


def apply(linear: Linear, rows: torch.Tensor, linear_delta: LinearDelta | None, layer: int, name: int) -> torch.Tensor:
    """`linear` of `rows`, with the added terms."""
    out = linear(rows)
    if linear_delta is not None:
        linear_delta.add(layer, name, rows, out)
    return out
