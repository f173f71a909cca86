"""A causal language model of the Llama family over a cache of slots: the forward pass of one iteration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from shapeshift.fused_decode import native as native_kernels
from shapeshift.fused_decode import rope
from shapeshift.fused_decode.architecture import PRECISION_BYTES, Architecture
from shapeshift.fused_decode.cache import KeyValueCache
from shapeshift.fused_decode.fallback import TorchOperations
from shapeshift.fused_decode.linear import Linear, maker
from shapeshift.fused_decode.operations import AttentionLayer, Operations
from shapeshift.fused_decode.step import StepBatch
from shapeshift.fused_decode.weights import EMBEDDING, FINAL_NORM, HEAD, WeightFiles
from shapeshift.settings import require

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_warn = logging.getLogger(__name__).warning


@dataclass(frozen=True)
class Layer:
    """One decoder layer: q, k and v in one linear, gate and up in another; norm weights in f32."""

    attention_norm: torch.Tensor
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class DecodeModel:
    """See `step.Runtime`. The residual state is f32; linears and cache have the stated precision."""

    def __init__(
        self,
        architecture: Architecture,
        operations: Operations,
        cache: KeyValueCache,
        embedding: torch.Tensor,
        layers: list[Layer],
        norm: torch.Tensor,
        head: Linear,
    ) -> None:
        self.architecture = architecture
        self.operations = operations
        self.vocab_size = architecture.vocab_size
        self.eos_ids = architecture.eos_ids
        self.slots, self.max_length = cache.keys.shape[1], cache.keys.shape[3]
        self._cache = cache
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    @classmethod
    def load(
        cls,
        checkpoint_dir: Path,
        *,
        precision: str,
        slots: int,
        max_length: int,
        threads: int,
        native: bool = True,
        cache_dir: Path,
        log: Callable[[str], None] = _warn,
    ) -> DecodeModel:
        """The model of a checkpoint folder, with `slots` empty slots of `max_length` tokens.

        precision  f32 or bf16: of weights, cache and what passes between kernels
        threads    of torch, for the whole process
        native     false: plain torch instead of the native kernels
        cache_dir  where the compiled kernels are kept

        Raises InvalidInputError for a checkpoint or a setting that cannot be meant. What runs slower than it
        might is said through `log`.
        """
        require(precision in PRECISION_BYTES, "precision", precision, f"one of {', '.join(PRECISION_BYTES)}")
        require(threads >= 1, "threads", threads, "at least 1")
        torch.set_num_threads(threads)
        architecture = Architecture.read(checkpoint_dir)
        files = WeightFiles(checkpoint_dir, architecture)
        dtype = DTYPES[precision]
        cache = KeyValueCache(architecture, slots, max_length, dtype)
        compiled = native_kernels.load(cache_dir, log) if native else None
        with torch.inference_mode():
            builder = _Builder(architecture, files, cache, dtype, maker(dtype, log))
            layers = [builder.layer(index) for index in range(architecture.layers)]
            embedding = files.read(EMBEDDING, dtype)
            head = builder.linear(EMBEDDING if architecture.tied else HEAD)
        norm = files.read(FINAL_NORM, torch.float32)
        return cls(architecture, compiled or TorchOperations(), cache, embedding, layers, norm, head)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `step.Runtime.forward`. Raises InvalidInputError for rows that do not fit the cache."""
        self._check(batch)
        with torch.inference_mode():
            return self._run(batch)

    def move(self, source: int, target: int, length: int) -> None:
        """See `step.Runtime.move`."""
        self._cache.move(source, target, length)

    def _run(self, batch: StepBatch) -> torch.Tensor:
        a, operations = self.architecture, self.operations
        plan = operations.plan(batch, a.kv_heads, a.heads // a.kv_heads)
        last = (batch.lengths.cumsum(0) - 1)[batch.wanted]
        dtype = self._embedding.dtype
        state = functional.embedding(batch.tokens, self._embedding).float()
        delta: torch.Tensor | None = None
        for layer in self._layers:
            normed = operations.add_norm(state, delta, layer.attention_norm, a.norm_eps, dtype)
            mixed = operations.attention(layer.qkv(normed), layer.attention, plan)
            if layer is self._layers[-1]:
                # Nothing after the last attention looks at other tokens.
                if last.shape[0] == 0:
                    return state.new_empty(0, self.vocab_size)
                state, mixed = state[last], mixed[last]
            normed = operations.add_norm(state, layer.output(mixed), layer.mlp_norm, a.norm_eps, dtype)
            delta = layer.down(operations.gate(layer.gate_up(normed)))
        return self._head(operations.add_norm(state, delta, self._norm, a.norm_eps, dtype)).float()

    def _check(self, batch: StepBatch) -> None:
        slots, starts, lengths = batch.slots.tolist(), batch.starts.tolist(), batch.lengths.tolist()
        require(len(slots) >= 1, "rows", len(slots), "at least 1")
        require(min(slots) >= 0 and max(slots) < self.slots, "slots", slots, f"0 to {self.slots - 1}")
        require(len(set(slots)) == len(slots), "slots", slots, "each slot once")
        require(min(starts) >= 0, "starts", starts, "0 or more")
        require(min(lengths) >= 1, "lengths", lengths, "at least 1")
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        require(max(ends) <= self.max_length, "starts + lengths", ends, f"at most max_length ({self.max_length})")
        total = sum(lengths)
        require(batch.tokens.shape[0] == total, "tokens", batch.tokens.shape[0], f"{total}, the sum of lengths")


class _Builder:
    """Makes layers from the tensors of a checkpoint."""

    def __init__(
        self,
        architecture: Architecture,
        files: WeightFiles,
        cache: KeyValueCache,
        dtype: torch.dtype,
        make: Callable[[torch.Tensor, torch.Tensor | None], Linear],
    ) -> None:
        self._architecture = architecture
        self._files = files
        self._cache = cache
        self._dtype = dtype
        self._make = make
        self._tables = rope.tables(architecture, cache.keys.shape[3])

    def linear(self, *weights: str, biased: bool = False) -> Linear:
        """One linear of the named weights one below the other, with their biases where there are any."""
        weight = torch.cat([self._files.read(name, self._dtype) for name in weights])
        biases = [self._files.read(name.replace(".weight", ".bias"), self._dtype) for name in weights] if biased else []
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
        return self._files.read(f"{name}.weight", torch.float32)
