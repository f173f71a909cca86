"""The decode step's native operations, and how they come into the process."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shapeshift.fused_decode import compiled
from shapeshift.fused_decode.adjust import LowRank
from shapeshift.fused_decode.linear import Linear
from shapeshift.fused_decode.network import Layer, Network
from shapeshift.fused_decode.operations import AttentionLayer, Pass
from shapeshift.fused_decode.step import StepBatch

_NAMESPACE = "shapeshift_decode"
_once = threading.Lock()


class NativeLinear:
    """Linear of f32 over weights in panels (`kernels/linear.h`); the plain weights are not kept.

    A row's result does not depend on how many rows there are. Made once the kernels are in the process.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed: Any = getattr(torch.classes, _NAMESPACE).Linear(weight, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.packed.forward(rows)
        return out


class NativeOperations:
    """See `operations.Operations`. Made by `load`, which brings the kernels into the process."""

    name = "native"

    def __init__(self) -> None:
        kernels = getattr(torch.ops, _NAMESPACE)
        self._plan = kernels.plan.default
        self._attention = kernels.attention.default
        self._add_norm = kernels.add_norm.default
        self._gate = kernels.gate.default

    def plan(self, batch: StepBatch, kv_heads: int, group: int) -> tuple[torch.Tensor, bool]:
        """Tasks INT32 [tasks, 5], and whether a row is split into several."""
        tasks: torch.Tensor = self._plan(batch.slots, batch.starts, batch.lengths, kv_heads, group)
        return tasks, tasks.shape[0] > batch.slots.shape[0] * kv_heads

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: tuple[torch.Tensor, bool]) -> torch.Tensor:
        tasks, split = plan
        out: torch.Tensor = self._attention(
            qkv,
            layer.keys,
            layer.values,
            layer.cosines,
            layer.sines,
            tasks,
            layer.query_norm,
            layer.key_norm,
            layer.eps,
            layer.window,
            split,
        )
        return out

    def add_norm(
        self, state: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        out: torch.Tensor = self._add_norm(state, delta, weight, eps, dtype)
        return out

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._gate(both)
        return out

    def whole(self, network: Network) -> Pass | None:
        """See `operations.Operations`. There for f32, whose linears are native too."""
        if not isinstance(network.head, NativeLinear):
            return None
        made = getattr(torch.classes, _NAMESPACE).Network(
            network.embedding, network.norm, network.head.packed, network.architecture.norm_eps
        )
        for layer in network.layers:
            made.add(*_parts(layer))

        def run(
            tokens: torch.Tensor, plan: tuple[torch.Tensor, bool], last: torch.Tensor, terms: LowRank | None
        ) -> torch.Tensor:
            logits: torch.Tensor = made.forward(tokens, *plan, last, [] if terms is None else terms.arrays())
            return logits

        return run


def _parts(layer: Layer) -> tuple[Any, ...]:
    """What the native network takes of a layer, in its order."""
    own = layer.attention
    caches = (own.keys, own.values, own.cosines, own.sines, own.query_norm, own.key_norm, own.eps, own.window)
    attention = (layer.attention_norm, _packed(layer.qkv), *caches, _packed(layer.output))
    return *attention, layer.mlp_norm, _packed(layer.gate_up), _packed(layer.down)


def _packed(linear: Linear) -> Any:
    assert isinstance(linear, NativeLinear), "the linears of a network are of one kind"
    return linear.packed


def load(cache_dir: Path, log: Callable[[str], None]) -> NativeOperations | None:
    """The native operations, compiled into `cache_dir` unless they lie there already; None where they cannot be had.

    The reason for None is said in one line through `log`.
    """
    with _once:
        if not hasattr(getattr(torch.ops, _NAMESPACE), "attention"):
            try:
                torch.ops.load_library(str(compiled.library(cache_dir)))  # type: ignore[no-untyped-call]
            except (OSError, subprocess.SubprocessError) as error:
                log(f"decode kernels in plain torch, several times slower: {compiled.reason(error)}")
                return None
        return NativeOperations()
