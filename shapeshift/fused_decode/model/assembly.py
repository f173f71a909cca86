"""A network is assembled from the tensors of a checkpoint, over the buffers of a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.kv_cache import KeyValueCache
from shapeshift.fused_decode.model.native_operations import NativeLinear
from shapeshift.fused_decode.model.network import (
    AttentionLayer,
    Beside,
    DeltaLayer,
    Layer,
    LayerInput,
    LayerInputs,
    Linear,
    Network,
    Norm,
)
from shapeshift.fused_decode.model.parts import DELTA, DeltaNet, Experts
from shapeshift.fused_decode.model.tensor_layout import SHARED, head_order, parts_order
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import QUANTISED
from shapeshift.settings import Choices

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""From weight [outputs, inputs] and bias [outputs] or None."""
_MODEL = "shapeshift.fused_decode.model"
MAKERS: Choices[Any] = Choices(
    "linear",
    {
        "torch": f"{_MODEL}.torch_operations:PlainLinear",
        "levels": f"{_MODEL}.quantised:level_makers",
        "experts": f"{_MODEL}.experts:ExpertMlps",
    },
)
"""What makes the linears that are not native ones of plain weights, and the experts of a layer, of their linears."""


@dataclass(frozen=True)
class LinearMakers:
    """How linears are made.

    linear  makes those of the layers
    head    makes the output head
    dtype   in which they get weights and biases
    packed  makes those of the layers of a checkpoint with `quantised.Levels` of `bits` bits from these
    native  whether the native operations are loaded
    """

    linear: MakeLinear
    head: MakeLinear
    dtype: torch.dtype
    packed: Callable[[Any, torch.Tensor | None], Linear] | None = None
    bits: int = 0
    native: bool = False


def linear_makers(precision: str, group_size: int, dtype: torch.dtype, native: bool) -> LinearMakers:
    """The makers of a network on a CPU whose activations are of `dtype`.

    group_size  see `settings.group_of`
    native      whether the native operations are loaded
    """
    if precision in QUANTISED:
        makers: LinearMakers = MAKERS["levels"](precision, group_size, native)
        return replace(makers, native=native)
    make: MakeLinear = NativeLinear if native else MAKERS["torch"]
    return LinearMakers(make, make, dtype, native=native)


class WeightStore:
    """Where the linears and the embedding of a network come from. `make` makes one from the checkpoint: here, each."""

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        return make()

    def table(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


def assemble(
    architecture: Architecture,
    files: WeightFiles,
    cache: KeyValueCache,
    dtype: torch.dtype,
    make: LinearMakers,
    weights: WeightStore | None = None,
) -> Network:
    """The network of a checkpoint over the buffers of `cache`, on its device; `dtype` is that of the activations.

    weights: None: all are made.
    """
    with torch.inference_mode():
        return _Builder(architecture, files, cache, dtype, make, weights or WeightStore()).network()


@dataclass(frozen=True)
class _Builder:
    """Builds layers from the tensors of a checkpoint."""

    architecture: Architecture
    files: WeightFiles
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
            self._inputs() if a.layer_inputs else None,
        )

    def _inputs(self) -> LayerInputs:
        a, names = self.architecture, self.architecture.tensors
        return LayerInputs(
            self.weights.table("inputs", lambda: self._scaled(f"{names.input_table}.weight", a.layer_inputs**0.5)),
            self.weights.linear(
                "inputs_projection",
                lambda: self.make.head(self._read(f"{names.inputs_projection}.weight", self.make.dtype), None),
            ),
            self._norm(names.inputs_norm),
        )

    def _query_scales(self, index: int) -> torch.Tensor | None:
        a, length = self.architecture.layer(index), self.cache.max_length
        if not a.query_growth or length + a.query_ahead <= a.query_span:
            return None
        turns = (torch.arange(length, device=self.cache.device) + a.query_ahead) // a.query_span
        return 1.0 + a.query_growth * torch.log1p(turns.float())

    def _embedding(self) -> torch.Tensor:
        return self._scaled(self._table, self.architecture.embedding_scale)

    def _scaled(self, name: str, scale: float) -> torch.Tensor:
        """The table `name` times `scale`, rounded once, after the scaling."""
        table = self._read(name, self.dtype if scale == 1 else torch.float32)
        if scale != 1:
            table *= scale
        return table.to(self.dtype)

    def _head(self) -> Linear:
        a, name = self.architecture, self.architecture.tensors.head
        bias = self._read(f"{name}.bias", self.make.dtype) if a.head_bias else None
        weight = self._table if a.tied else f"{name}.weight"
        if self.make.packed is not None and (levels := self.files.head_levels(weight)) is not None:
            return self.make.packed(levels, bias)
        return self.make.head(self._read(weight, self.make.dtype), bias)

    @property
    def _table(self) -> str:
        return f"{self.architecture.tensors.embedding}.weight"

    def _layer(self, index: int) -> Layer:
        a, names = self.architecture.layer(index), self.architecture.tensors
        prefix = f"{names.layers}.{index}."
        before, after, middle, end = (
            self._norm(f"{prefix}{name}") if name else None
            for name in (names.attention_norm, names.attention_end, names.mlp_norm, names.mlp_end)
        )
        row, head = (
            [
                self._vector_norm(index, names.query_norm),
                self._vector_norm(index if a.kv_layer < 0 else a.kv_layer, names.key_norm),
            ]
            if a.qk_norm == kind
            else [None, None]
            for kind in ("row", "head")
        )
        query, key = row
        return Layer(
            attention_norm=before,
            qkv=self._linear(index, "qkv"),
            row_norms=None if query is None or key is None else (query, key),
            attention=self._attention(index, *head) if a.delta is None else self._delta_net(index, a.delta),
            output=self._linear(index, "output"),
            attention_end=after,
            mlp_norm=middle,
            gate_up=self._linear(index, "gate_up") if a.experts is None or a.beside else None,
            down=self._linear(index, "down") if a.experts is None or a.beside else None,
            mlp_end=end,
            experts=None if a.experts is None else self._experts(index, a.experts),
            query_scales=self._query_scales(index),
            kv_layer=a.kv_layer,
            beside=self._beside(prefix) if a.beside else None,
            input=self._input(index, prefix) if a.layer_inputs else None,
            scale=float(self._read(f"{prefix}{names.layer_scale}", torch.float32)) if a.layer_scale else 1.0,
        )

    def _beside(self, prefix: str) -> Beside:
        names = self.architecture.tensors
        return Beside(
            *(self._norm(f"{prefix}{name}") for name in (names.dense_end, names.experts_norm, names.experts_end))
        )

    def _input(self, index: int, prefix: str) -> LayerInput:
        return LayerInput(
            self._linear(index, "input_gate"),
            self._linear(index, "input_projection"),
            self._norm(f"{prefix}{self.architecture.tensors.input_norm}"),
        )

    def _experts(self, index: int, experts: Experts) -> Any:
        names, prefix = self.architecture.layer(index).tensors, f"{self.architecture.tensors.layers}.{index}."
        # In f32: which experts a token gets is a jump.
        weight = self._read(f"{prefix}{names.router}.weight", torch.float32)
        if experts.shared_gate:
            weight = torch.cat([weight, self._read(f"{prefix}{names.shared_gate}.weight", torch.float32)])
        bias = self._read(f"{prefix}{names.router}.bias", torch.float32) if experts.biased else None
        correction = self._read(f"{prefix}{names.correction}", torch.float32).view(-1) if experts.correction else None
        scales = None
        if experts.scaled:
            weight *= self._read(f"{prefix}{names.router_scale}", torch.float32) * self.architecture.hidden**-0.5
            scales = self._read(f"{prefix}{names.expert_scales}", torch.float32)
        ends = [*(f".{number}" for number in range(experts.count)), *([SHARED] if experts.shared else [])]
        gate_up, down = ([self._linear(index, f"{kind}{end}") for end in ends] for kind in ("gate_up", "down"))
        return MAKERS["experts"](experts, self._plain_linear(weight, bias), gate_up, down, correction, scales)

    def _plain_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A linear of rows in f32, whatever the precision of the others is."""
        if self.make.native:
            return NativeLinear(weight, bias)
        return lambda rows: functional.linear(rows, weight, bias)

    def _delta_net(self, index: int, delta: DeltaNet) -> DeltaLayer:
        prefix, states = f"{self.architecture.tensors.layers}.{index}.{DELTA}", self.cache.states
        assert states is not None, "a cache without states"

        def read(name: str) -> torch.Tensor:
            return self._read(f"{prefix}{name}", torch.float32)

        if delta.stacked:
            each = delta.heads // delta.key_heads
            shares = read("in_proj_ba.weight")[parts_order(delta.key_heads, (each, each))]
        else:
            shares = torch.cat([read("in_proj_b.weight"), read("in_proj_a.weight")])
        return DeltaLayer(
            # As many outputs as heads: in f32 they cost nothing, and what a state keeps is kept often.
            shares=self._plain_linear(shares, None),
            weight=read("conv1d.weight")[:, 0].T.contiguous(),
            decay=-read("A_log").exp(),
            bias=read("dt_bias"),
            norm=read("norm.weight"),
            eps=self.architecture.norm_eps,
            window=states.windows[index],
            state=states.states[index],
        )

    def _attention(self, index: int, query_norm: Norm | None, key_norm: Norm | None) -> AttentionLayer:
        a, tables, cache = self.architecture.layer(index), self.cache.tables[index], self.cache
        query, key = (None if norm is None else norm.weight for norm in (query_norm, key_norm))
        return AttentionLayer(
            keys=cache.keys[index],
            values=cache.values[index],
            cosines=tables.cosines,
            sines=tables.sines,
            query_norm=query,
            key_norm=key,
            eps=a.norm_eps,
            window=a.windows[index],
            scale=a.scales[index],
            score_cap=a.score_cap,
            key_scales=cache.key_scales[index] if cache.key_scales else None,
            value_scales=cache.value_scales[index] if cache.value_scales else None,
            sinks=self._read(f"{a.tensors.layers}.{index}.{a.tensors.sinks}", torch.float32) if a.sinks else None,
            norm_last=a.norm_last,
            chunked=a.chunked,
            gated=a.gated_heads,
        )

    def _linear(self, index: int, name: str) -> Linear:
        return self.weights.linear(f"{index}.{name}", lambda: self._made(index, name))

    def _made(self, index: int, name: str) -> Linear:
        packing = self.files.packing(index, name)
        if self.make.packed is not None and packing is not None and packing.bits == self.make.bits:
            return self.make.packed(*self.files.levels(index, name, self.make.dtype))
        weight, bias = self.files.linear(index, name, self.make.dtype)
        device = self.cache.device
        return self.make.linear(weight.to(device), None if bias is None else bias.to(device))

    def _norm(self, name: str) -> Norm:
        plain, kind = self._plain_norm(name), self.architecture.norm
        if kind == "centred":
            return Norm(plain.weight, torch.zeros_like(plain.weight), plain.eps)
        bias = self._read(f"{name}.bias", torch.float32) if kind == "layer" else None
        return Norm(plain.weight, bias, plain.eps)

    def _vector_norm(self, index: int, name: str) -> Norm:
        """Of queries or keys, whose elements lie in the order in which they rotate: see `qkv_order`. Without a name it
        has no weights."""
        a, rope = self.architecture.layer(index), self.architecture.ropes[index]
        if not name:
            return Norm(torch.ones(a.head_dim, device=self.cache.device), None, a.norm_eps)
        plain = self._plain_norm(f"{a.tensors.layers}.{index}.{name}")
        order = head_order(a.head_dim, rope.rotated if rope else 0, a.interleaved)
        return replace(plain, weight=plain.weight.view(-1, a.head_dim)[:, order].flatten())

    def _plain_norm(self, name: str) -> Norm:
        weight = self._read(f"{name}.weight", torch.float32) + self.architecture.norm_offset
        return Norm(weight, None, self.architecture.norm_eps)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.files.read(name, dtype).to(self.cache.device)
