"""A decoder as linears, norms and embedding, and its forward pass. `architecture` describes what the layers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from shapeshift.fused_decode.interfaces import DOWN, GATE_UP, OUTPUT, QKV, LinearDelta
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.kv_cache import KeyValueCache
from shapeshift.fused_decode.model.linear import Linear
from shapeshift.fused_decode.model.operations import AttentionLayer, Operations, cap
from shapeshift.fused_decode.model.quantised.levels import Levels

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""From weight [outputs, inputs] and bias [outputs] or None."""
Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
}


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
class Layer:
    """One decoder layer: one linear for q, k and v, one for gate and up, norms before and after each branch.

    row_norms: of all queries and of all keys of a token; None where the model has none.
    """

    attention_norm: Norm | None
    qkv: Linear
    row_norms: tuple[Norm, Norm] | None
    attention: AttentionLayer
    output: Linear
    attention_end: Norm | None
    mlp_norm: Norm | None
    gate_up: Linear
    down: Linear
    mlp_end: Norm | None


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

    def forward(
        self,
        operations: Operations,
        tokens: torch.Tensor,
        places: torch.Tensor,
        plan: Any,
        last: torch.Tensor,
        linear_delta: LinearDelta | None = None,
    ) -> torch.Tensor:
        """Logits FLOAT32 [wanted, vocab_size] after the tokens at `last`, INT64 [wanted] places in `tokens`.

        places: the place of each token in its text, INT64 [tokens].
        """
        a = self.architecture
        state = functional.embedding(tokens, self.embedding).float()
        if self.positions is not None:
            state += self.positions[places]
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = self._enter(operations, state, delta, layer.attention_norm)
            mixed = self._attend(operations, layer, apply(layer.qkv, normed, linear_delta, index, QKV), plan)
            if layer is self.layers[-1]:
                # After the last attention, only the wanted tokens matter.
                if last.shape[0] == 0:
                    return state.new_empty(0, a.vocab_size)
                state, mixed = state[last], mixed[last]
                linear_delta = None if linear_delta is None else linear_delta.subset(last)
            attended = self._leave(apply(layer.output, mixed, linear_delta, index, OUTPUT), layer.attention_end)
            normed = self._enter(operations, state, None if a.parallel else attended, layer.mlp_norm)
            inner = self._activate(operations, apply(layer.gate_up, normed, linear_delta, index, GATE_UP))
            delta = self._leave(apply(layer.down, inner, linear_delta, index, DOWN), layer.mlp_end)
            if a.parallel:
                delta = delta + attended
        logits = self.head(self._enter(operations, state, delta, self.norm)).float() * a.logit_scale
        return cap(logits, a.logit_cap) if a.logit_cap else logits

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

    def _attend(self, operations: Operations, layer: Layer, qkv: torch.Tensor, plan: Any) -> torch.Tensor:
        if layer.row_norms is not None:
            queries, keys = self.architecture.query_width, self.architecture.kv_width
            for rows, norm in zip((qkv[:, :queries], qkv[:, queries : queries + keys]), layer.row_norms, strict=True):
                rows.copy_(norm(rows))
        return operations.attention(qkv, layer.attention, plan)

    def _activate(self, operations: Operations, both: torch.Tensor) -> torch.Tensor:
        a = self.architecture
        if a.gated and a.activation == "silu":
            return operations.gate(both)
        gate, *others = both.float().chunk(2, dim=-1) if a.gated else (both.float(),)
        inner = ACTIVATIONS[a.activation](gate)
        return (inner * others[0] if others else inner).to(both.dtype)


def apply(linear: Linear, rows: torch.Tensor, linear_delta: LinearDelta | None, layer: int, name: int) -> torch.Tensor:
    """`linear` of `rows`, with the added terms."""
    out = linear(rows)
    if linear_delta is not None:
        linear_delta.add(layer, name, rows, out)
    return out


class Weights(Protocol):
    """Where the tensors of a network come from, see `weights.WeightFiles`."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...
    def linear(self, layer: int, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def levels(self, layer: int, name: str, dtype: torch.dtype) -> tuple[Levels, torch.Tensor | None]: ...


@dataclass(frozen=True)
class LinearMakers:
    """How linears are made.

    linear  makes those of the layers
    head    makes the output head
    dtype   in which they get weights and biases
    packed  makes those of the layers of a checkpoint with levels of `bits` bits from these
    """

    linear: MakeLinear
    head: MakeLinear
    dtype: torch.dtype
    packed: Callable[[Levels, torch.Tensor | None], Linear] | None = None
    bits: int = 0


class WeightStore(Protocol):
    """Where the linears and the embedding of a network come from. `make` makes one from the checkpoint."""

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear: ...

    def table(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor: ...


class OwnWeights:
    """See `WeightStore`: all is made."""

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        return make()

    def table(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


def assemble(
    architecture: Architecture,
    files: Weights,
    cache: KeyValueCache,
    dtype: torch.dtype,
    make: LinearMakers,
    weights: WeightStore | None = None,
) -> Network:
    """The network of a checkpoint over the buffers of `cache`, on its device; `dtype` is that of the activations.

    weights: None: all are made.
    """
    with torch.inference_mode():
        return _Builder(architecture, files, cache, dtype, make, weights or OwnWeights()).network()


@dataclass(frozen=True)
class _Builder:
    """Builds layers from the tensors of a checkpoint."""

    architecture: Architecture
    files: Weights
    cache: KeyValueCache
    dtype: torch.dtype
    make: LinearMakers
    weights: WeightStore

    def network(self) -> Network:
        a, names = self.architecture, self.architecture.tensors
        positions = self._read(f"{names.positions}.weight", torch.float32) if names.positions else None
        return Network(
            a,
            self.weights.table("embedding", self._embedding),
            None if positions is None else positions[: self.cache.max_length].contiguous(),
            [self._layer(index) for index in range(a.layers)],
            self._norm(names.final_norm),
            self.weights.linear("head", self._head),
        )

    def _embedding(self) -> torch.Tensor:
        a = self.architecture
        # Rounded once, after the scaling.
        table = self._read(self._table, self.dtype if a.embedding_scale == 1 else torch.float32)
        if a.embedding_scale != 1:
            table *= a.embedding_scale
        return table.to(self.dtype)

    def _head(self) -> Linear:
        a, name = self.architecture, self.architecture.tensors.head
        bias = self._read(f"{name}.bias", self.make.dtype) if a.head_bias else None
        return self.make.head(self._read(self._table if a.tied else f"{name}.weight", self.make.dtype), bias)

    @property
    def _table(self) -> str:
        return f"{self.architecture.tensors.embedding}.weight"

    def _layer(self, index: int) -> Layer:
        a, names = self.architecture, self.architecture.tensors
        prefix = f"{names.layers}.{index}."
        before, after, middle, end = (
            self._norm(f"{prefix}{name}") if name else None
            for name in (names.attention_norm, names.attention_end, names.mlp_norm, names.mlp_end)
        )
        row, head = (
            [self._plain_norm(f"{prefix}{name}") for name in (names.query_norm, names.key_norm)]
            if a.qk_norm == kind
            else [None, None]
            for kind in ("row", "head")
        )
        query, key = row
        return Layer(
            attention_norm=before,
            qkv=self._linear(index, "qkv"),
            row_norms=None if query is None or key is None else (query, key),
            attention=self._attention(index, *(None if norm is None else norm.weight for norm in head)),
            output=self._linear(index, "output"),
            attention_end=after,
            mlp_norm=middle,
            gate_up=self._linear(index, "gate_up"),
            down=self._linear(index, "down"),
            mlp_end=end,
        )

    def _attention(self, index: int, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None) -> AttentionLayer:
        a, tables, cache = self.architecture, self.cache.tables[index], self.cache
        return AttentionLayer(
            keys=cache.keys[index],
            values=cache.values[index],
            cosines=tables.cosines,
            sines=tables.sines,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=a.norm_eps,
            window=a.windows[index],
            scale=a.scales[index],
            score_cap=a.score_cap,
            key_scales=None if cache.key_scales is None else cache.key_scales[index],
            value_scales=None if cache.value_scales is None else cache.value_scales[index],
        )

    def _linear(self, index: int, name: str) -> Linear:
        return self.weights.linear(f"{index}.{name}", lambda: self._made(index, name))

    def _made(self, index: int, name: str) -> Linear:
        packing = self.architecture.packing
        if self.make.packed is not None and packing is not None and packing.bits == self.make.bits:
            return self.make.packed(*self.files.levels(index, name, self.make.dtype))
        weight, bias = self.files.linear(index, name, self.make.dtype)
        device = self.cache.keys.device
        return self.make.linear(weight.to(device), None if bias is None else bias.to(device))

    def _norm(self, name: str) -> Norm:
        plain = self._plain_norm(name)
        bias = self._read(f"{name}.bias", torch.float32) if self.architecture.norm == "layer" else None
        return Norm(plain.weight, bias, plain.eps)

    def _plain_norm(self, name: str) -> Norm:
        weight = self._read(f"{name}.weight", torch.float32) + self.architecture.norm_offset
        return Norm(weight, None, self.architecture.norm_eps)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.files.read(name, dtype).to(self.cache.keys.device)
