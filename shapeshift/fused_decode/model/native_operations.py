"""The native operations of the decode step, and their loading into the process."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shapeshift.fused_decode.interfaces import LowRank, StepBatch
from shapeshift.fused_decode.model.network import (
    ACTIVATIONS,
    AttentionLayer,
    DeltaLayer,
    FusedForward,
    Layer,
    Linear,
    Network,
)
from shapeshift.kernels import kernel_build
from shapeshift.serving.model_args import Log

KERNELS = Path(__file__).with_name("kernels")
_NAMESPACE, _LIBRARY = "shapeshift_decode", "decode"
_lock = threading.Lock()
Plan = dict[int, tuple[torch.Tensor, torch.Tensor, bool]]
"""By the key and value heads of a layer: tasks INT32 [tasks, 6], the blocks of each row (`StepBatch.blocks`), and
whether a row has several tasks."""
_SUFFIXES = {torch.float32: "", torch.bfloat16: "BFloat16"}


def _class(name: str, dtype: torch.dtype) -> Any:
    """The native class `name` for weights of `dtype`."""
    return getattr(getattr(torch.classes, _NAMESPACE), name + _SUFFIXES[dtype])


@dataclass(frozen=True)
class PackedWeight:
    """A linear's weight and bias as a native class takes them.

    kind     the name of the class
    sizes    inputs and outputs, and of levels the inputs of a group
    tensors  packed and, where it has them, bias, scales, zeros and minima
    """

    kind: str
    sizes: tuple[int, ...]
    tensors: dict[str, torch.Tensor]

    def linear(self, instructions: str) -> Any:
        """The native object, which reads the tensors as long as it lives."""
        tensors, (inputs, outputs, *group) = self.tensors, self.sizes
        levels = (tensors["scales"], tensors["zeros"], tensors.get("minima"), *group) if group else ()
        kind = getattr(getattr(torch.classes, _NAMESPACE), self.kind)
        return kind(tensors["packed"], inputs, outputs, *levels, tensors.get("bias"), instructions)


class NativeLinear:
    """Linear over weights in panels (`kernels/linear.h`, `linear_bf16.h`), without a copy of the plain weights.

    instructions: of bf16: tiles (AMX), pairs (avx512_bf16), plain, or best: the fastest of this CPU. RuntimeError for
    those that it lacks.

    A row's result does not depend on the number of rows. Needs `load` to have succeeded.
    """

    weight: PackedWeight

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, instructions: str = "best") -> None:
        packed = getattr(torch.ops, _NAMESPACE).pack(weight)
        sizes = weight.shape[1], weight.shape[0]
        tensors = {"packed": packed} | ({} if bias is None else {"bias": bias})
        self._hold(PackedWeight(f"Linear{_SUFFIXES[weight.dtype]}", sizes, tensors), instructions)

    @classmethod
    def of(cls, weight: PackedWeight) -> NativeLinear:
        """The linear of a weight that is packed."""
        linear = cls.__new__(cls)
        linear._hold(weight, "best")
        return linear

    @property
    def kind(self) -> str:
        """Of the weights: empty, or Levels and their bits."""
        return self.weight.kind.removeprefix("Linear") if len(self.weight.sizes) > 2 else ""

    def _hold(self, weight: PackedWeight, instructions: str) -> None:
        self.weight = weight
        self.packed: Any = weight.linear(instructions)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.packed.forward(rows)
        return out


def pack_levels(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels as the native linears read them."""
    packed: torch.Tensor = getattr(torch.ops, _NAMESPACE).pack_levels(levels, bits)
    return packed


def by_panel(values: torch.Tensor) -> torch.Tensor:
    """Values [outputs, groups] as the native linears read them."""
    laid: torch.Tensor = getattr(torch.ops, _NAMESPACE).by_panel(values)
    return laid


class NativeOperations:
    """See `network.Operations`. Only `load` makes one: it loads the kernels into the process."""

    name = "native"

    def __init__(self) -> None:
        kernels = getattr(torch.ops, _NAMESPACE)
        self._plan = kernels.plan.default
        self._attention = kernels.attention.default
        self._add_norm = kernels.add_norm.default
        self._delta_net = kernels.delta_net.default
        self._activate = kernels.activate.default

    def plan(self, batch: StepBatch, *kv_heads: int) -> Plan:
        assert batch.blocks is not None
        plan: Plan = {}
        for heads in kv_heads:
            tasks = self._plan(batch.slots, batch.starts, batch.lengths, heads)
            plan[heads] = tasks, batch.blocks, tasks.shape[0] > batch.slots.shape[0] * heads
        return plan

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Plan) -> torch.Tensor:
        tasks, blocks, split = plan[layer.keys.shape[1]]
        out: torch.Tensor = self._attention(
            qkv,
            layer.keys,
            layer.values,
            layer.key_scales,
            layer.value_scales,
            layer.cosines,
            layer.sines,
            tasks,
            blocks,
            layer.query_norm,
            layer.key_norm,
            layer.eps,
            layer.window,
            layer.scale,
            layer.score_cap,
            split,
            layer.sinks,
            layer.norm_last,
            layer.chunked,
            layer.gated,
        )
        return out

    def delta_net(
        self, inputs: torch.Tensor, shares: torch.Tensor, layer: DeltaLayer, runs: torch.Tensor
    ) -> torch.Tensor:
        parts = layer.weight, layer.decay, layer.bias, layer.norm, layer.eps, layer.window, layer.state
        out: torch.Tensor = self._delta_net(inputs, shares, *parts, runs)
        return out

    def add_norm(
        self, state: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        out: torch.Tensor = self._add_norm(state, delta, weight, eps, dtype)
        return out

    def activate(self, both: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        out: torch.Tensor = self._activate(both, ACTIVATIONS.index(activation), gated)
        return out

    def fused_forward(self, network: Network) -> FusedForward | None:
        """See `network.Operations`. Exists where the linears are native too, and for layers as Llama's."""
        if not isinstance(network.head, NativeLinear) or not network.is_one_operation:
            return None
        qkv = network.layers[0].qkv
        assert isinstance(qkv, NativeLinear), "a network mixes kinds of linears"
        make = _class(f"Network{qkv.kind}", network.embedding.dtype)
        native = make(network.embedding, network.norm.weight, network.head.packed, network.architecture.norm_eps)
        for layer in network.layers:
            native.add(*_parts(layer))

        forward = native.forward

        def run(batch: StepBatch, low_rank: LowRank | None) -> torch.Tensor:
            rows = (batch.slots, batch.starts, batch.lengths, batch.blocks, batch.logit_rows, batch.further)
            terms = [] if low_rank is None else low_rank.arrays()
            logits: torch.Tensor = forward(batch.tokens, *rows, terms, batch.draws.columns if batch.draws else [])
            if batch.draws is not None:
                batch.draws.is_done = True
            return logits

        return run


def _parts(layer: Layer) -> tuple[Any, ...]:
    """The arguments of the native network's `add` for one layer."""
    a = layer.attention
    assert isinstance(a, AttentionLayer), "a layer without attention"
    caches = (a.keys, a.values, a.key_scales, a.value_scales, a.cosines, a.sines)
    norms = (a.query_norm, a.key_norm, a.eps)
    assert layer.attention_norm is not None and layer.mlp_norm is not None, "a layer without a norm before its branches"
    attention = (layer.attention_norm.weight, _packed(layer.qkv), *caches, *norms, a.window, a.scale, a.score_cap)
    assert layer.gate_up is not None and layer.down is not None, "a layer with experts"
    mlp = (_packed(layer.output), layer.mlp_norm.weight, _packed(layer.gate_up), _packed(layer.down))
    return *attention, *mlp


def _packed(linear: Linear) -> Any:
    assert isinstance(linear, NativeLinear), "a network mixes kinds of linears"
    return linear.packed


def library(cache_dir: Path, progress: kernel_build.Progress = lambda step: None) -> Path:
    """The compiled kernels; see `kernel_build.library`."""
    return kernel_build.library(cache_dir, KERNELS, _LIBRARY, progress)


def load(cache_dir: Path, log: Log) -> NativeOperations | None:
    """The native operations, compiled into `cache_dir` at the first use; None where compiling fails.

    Logs the reason for None in one line.
    """
    with _lock:
        if not hasattr(getattr(torch.ops, _NAMESPACE), "attention"):
            try:
                torch.ops.load_library(str(library(cache_dir)))  # type: ignore[no-untyped-call]
            except (OSError, subprocess.SubprocessError) as error:
                log(f"decode kernels in plain torch, several times slower: {kernel_build.reason(error)}")
                return None
        return NativeOperations()
