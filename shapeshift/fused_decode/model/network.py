"""A decoder of the Llama family as linears, norms and embedding, and its forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from shapeshift.fused_decode.interfaces import DOWN, GATE_UP, OUTPUT, QKV, LinearDelta
from shapeshift.fused_decode.model.architecture import Architecture, Rope
from shapeshift.fused_decode.model.kv_cache import KeyValueCache
from shapeshift.fused_decode.model.linear import Linear
from shapeshift.fused_decode.model.operations import AttentionLayer, Operations
from shapeshift.fused_decode.model.weights import EMBEDDING, FINAL_NORM, HEAD, WeightFiles

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]


@dataclass(frozen=True)
class Layer:
    """One decoder layer: one linear for q, k and v, one for gate and up; norm weights in f32."""

    attention_norm: torch.Tensor
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Network:
    """The residual state is f32; linears, cache and `embedding` [vocab_size, hidden] share one dtype."""

    architecture: Architecture
    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: Linear

    def forward(
        self,
        operations: Operations,
        tokens: torch.Tensor,
        plan: Any,
        last: torch.Tensor,
        linear_delta: LinearDelta | None = None,
    ) -> torch.Tensor:
        """Logits FLOAT32 [wanted, vocab_size] after the tokens at `last`, INT64 [wanted] places in `tokens`."""
        eps, dtype = self.architecture.norm_eps, self.embedding.dtype
        state = functional.embedding(tokens, self.embedding).float()
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            normed = operations.add_norm(state, delta, layer.attention_norm, eps, dtype)
            mixed = operations.attention(apply(layer.qkv, normed, linear_delta, index, QKV), layer.attention, plan)
            if layer is self.layers[-1]:
                # After the last attention, only the wanted tokens matter.
                if last.shape[0] == 0:
                    return state.new_empty(0, self.architecture.vocab_size)
                state, mixed = state[last], mixed[last]
                linear_delta = None if linear_delta is None else linear_delta.subset(last)
            mixed = apply(layer.output, mixed, linear_delta, index, OUTPUT)
            normed = operations.add_norm(state, mixed, layer.mlp_norm, eps, dtype)
            gated = operations.gate(apply(layer.gate_up, normed, linear_delta, index, GATE_UP))
            delta = apply(layer.down, gated, linear_delta, index, DOWN)
        return self.head(operations.add_norm(state, delta, self.norm, eps, dtype)).float()


def apply(linear: Linear, rows: torch.Tensor, linear_delta: LinearDelta | None, layer: int, name: int) -> torch.Tensor:
    """`linear` of `rows`, with the added terms."""
    out = linear(rows)
    if linear_delta is not None:
        linear_delta.add(layer, name, rows, out)
    return out


def assemble(
    architecture: Architecture, files: WeightFiles, cache: KeyValueCache, dtype: torch.dtype, make: MakeLinear
) -> Network:
    """The network of a checkpoint over the buffers of `cache`, on its device; `make` makes the linears."""
    with torch.inference_mode():
        builder = _Builder(architecture, files, cache, dtype, make)
        return Network(
            architecture,
            builder.read(EMBEDDING, dtype),
            [builder.layer(index) for index in range(architecture.layers)],
            builder.read(FINAL_NORM, torch.float32),
            builder.linear(EMBEDDING if architecture.tied else HEAD),
        )


class _Builder:
    """Builds layers from the tensors of a checkpoint."""

    def __init__(
        self,
        architecture: Architecture,
        files: WeightFiles,
        cache: KeyValueCache,
        dtype: torch.dtype,
        make: MakeLinear,
    ) -> None:
        self._architecture = architecture
        self._files = files
        self._cache = cache
        self._dtype = dtype
        self._make = make
        self._device = cache.keys.device
        cosines, sines = rope_tables(architecture, cache.keys.shape[3])
        self._tables = cosines.to(self._device), sines.to(self._device)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._files.read(name, dtype).to(self._device)

    def linear(self, *weights: str, biased: bool = False) -> Linear:
        """One linear of the named weights, stacked, with their biases where there are any."""
        weight = torch.cat([self.read(name, self._dtype) for name in weights])
        biases = [self.read(name.replace(".weight", ".bias"), self._dtype) for name in weights] if biased else []
        return self._make(weight, torch.cat(biases) if biased else None)

    def layer(self, index: int) -> Layer:
        a, prefix = self._architecture, f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{name}_proj.weight" for name in "qkv"]
        gate_up = [f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up")]
        return Layer(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self.linear(*qkv, biased=a.qkv_bias),
            attention=self._attention(index),
            output=self.linear(f"{prefix}.self_attn.o_proj.weight", biased=a.output_bias),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self.linear(*gate_up, biased=a.mlp_bias),
            down=self.linear(f"{prefix}.mlp.down_proj.weight", biased=a.mlp_bias),
        )

    def _attention(self, index: int) -> AttentionLayer:
        a, prefix = self._architecture, f"model.layers.{index}.self_attn"
        return AttentionLayer(
            keys=self._cache.keys[index],
            values=self._cache.values[index],
            cosines=self._tables[0],
            sines=self._tables[1],
            query_norm=self._norm(f"{prefix}.q_norm") if a.qk_norm else None,
            key_norm=self._norm(f"{prefix}.k_norm") if a.qk_norm else None,
            eps=a.norm_eps,
            window=a.windows[index],
        )

    def _norm(self, name: str) -> torch.Tensor:
        return self.read(f"{name}.weight", torch.float32)


def rope_tables(architecture: Architecture, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0 to length-1, FLOAT32 [length, head_dim / 2] each.

    Element i of a head rotates with element i + head_dim / 2, as in Hugging Face's checkpoints.
    """
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rope_frequencies(
        architecture.rope, architecture.head_dim
    )
    return angles.cos(), angles.sin()


def rope_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of a head, FLOAT32 [head_dim / 2]."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: waves that fit `high` times into the original length stay, waves that do not fit `low` times are
    stretched by `factor`, and between the two the shares change linearly with the number of turns."""
    turns = rope.original * plain / (2 * math.pi)
    kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor
