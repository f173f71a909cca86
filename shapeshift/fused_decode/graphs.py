"""The decode step on an NVIDIA GPU, as CUDA graphs.

Written to the documented interface of torch.cuda; the capture and replay of graphs have not been run by us. What
is captured has: it is plain torch, and tests run it on a CPU against the other runtime.

A step in which every row is one token takes the same path whatever it holds: it computes the first slots of the
cache, up to the highest one used, rounded up to a power of two, and over as many places of each as the longest row
needs, rounded up likewise. Slots without a row compute too, at a place that belongs to no text. So a graph for each
pair of bounds is enough; tokens and positions are copied into its inputs, and the only wait for the GPU is that for
the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.architecture import PRECISION_BYTES, Architecture
from shapeshift.fused_decode.cache import KeyValueCache
from shapeshift.fused_decode.fallback import TorchOperations, norm_heads, rotate
from shapeshift.fused_decode.linear import PlainLinear
from shapeshift.fused_decode.model import DTYPES, DecodeModel
from shapeshift.fused_decode.network import Network, assemble
from shapeshift.fused_decode.operations import AttentionLayer
from shapeshift.fused_decode.step import StepBatch
from shapeshift.fused_decode.weights import WeightFiles
from shapeshift.settings import require

_LEAST_CONTEXT = 64
_WARM_UPS = 3


@dataclass(frozen=True)
class Bounds:
    """What one graph computes: slots 0 to slots-1, places 0 to context-1 of each."""

    slots: int
    context: int


@dataclass(frozen=True)
class SlotRows:
    """The plan of a step over slots: `positions` INT64 [slots], the place of each slot's token."""

    positions: torch.Tensor
    bounds: Bounds


class SlotOperations(TorchOperations):
    """Plain torch whose shapes depend on the bounds alone and which never waits for the device; planned by SlotRows."""

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        count, kv_heads, head_dim = plan.bounds.slots, layer.keys.shape[1], layer.keys.shape[3]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        parts = qkv.float().view(count, 1, -1, head_dim)
        query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], dim=2)
        positions = plan.positions[:, None]
        query = rotate(norm_heads(query, layer.query_norm, layer.eps), positions, layer)
        key = rotate(norm_heads(key, layer.key_norm, layer.eps), positions, layer)
        rows = torch.arange(count, device=qkv.device)
        layer.keys[rows, :, plan.positions] = key[:, 0].to(layer.keys.dtype)
        layer.values[rows, :, plan.positions] = value[:, 0].to(layer.values.dtype)
        places = torch.arange(plan.bounds.context, device=qkv.device)
        seen = places <= positions
        if layer.window:
            seen &= places > positions - layer.window
        keys, values = (cache[:count, :, : plan.bounds.context] for cache in (layer.keys, layer.values))
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2).to(keys.dtype), keys, values, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return mixed.flatten(1).to(qkv.dtype)


@dataclass(frozen=True)
class _Step:
    """One step within bounds: `run` takes `inputs` to `logits`, all at fixed addresses.

    host    INT64 [2, slots]  tokens and positions, as the CPU writes them
    inputs  INT64 [2, slots]  the same on the device
    logits  FLOAT32 [slots, vocab_size]
    """

    host: torch.Tensor
    inputs: torch.Tensor
    logits: torch.Tensor
    run: Callable[[], None]


class GraphedModel(DecodeModel):
    """See `step.Runtime`. Steps with a chunk of a prompt or an adapter run as they come; logits are on the CPU."""

    def __init__(self, network: Network, cache: KeyValueCache) -> None:
        self._device = cache.keys.device
        super().__init__(network, TorchOperations(self._device), cache)
        self._slot_operations = SlotOperations(self._device)
        self._steps: dict[Bounds, _Step] = {}

    @classmethod
    def load_on(
        cls,
        device: str,
        checkpoint_dir: Path,
        *,
        precision: str = "bf16",
        slots: int,
        max_length: int,
        beside: int = 0,
    ) -> GraphedModel:
        """The model of a checkpoint folder on `device`, such as "cuda:0"; `beside` as for `DecodeModel.load`.

        Raises InvalidInputError as `DecodeModel.load` does, UnsupportedError where torch sees no such device.
        """
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UnsupportedError(f"device {device}: torch sees no CUDA device")
        require(precision in PRECISION_BYTES, "precision", precision, f"one of {', '.join(PRECISION_BYTES)}")
        architecture, dtype = Architecture.read(checkpoint_dir), DTYPES[precision]
        files = WeightFiles(checkpoint_dir, architecture)
        cache = KeyValueCache(architecture, slots, max_length, dtype, device=device, spare=1, beside=beside)
        return cls(assemble(architecture, files, cache, dtype, PlainLinear), cache)

    def _run(self, batch: StepBatch) -> torch.Tensor:
        if int(batch.lengths.max()) > 1 or batch.adapters is not None:
            moved = dataclasses.replace(batch, tokens=batch.tokens.to(self._device))
            return super()._run(moved).cpu()
        bounds = Bounds(
            _bucket(int(batch.slots.max()) + 1, 1, self.slots),
            _bucket(int(batch.starts.max()) + 1, _LEAST_CONTEXT, self.max_length),
        )
        if bounds not in self._steps:
            self._steps[bounds] = self._prepared(bounds)
        step, slots = self._steps[bounds], batch.slots.long()
        self._clear(step.host)
        step.host[0, slots], step.host[1, slots] = batch.tokens, batch.starts.long()
        step.inputs.copy_(step.host, non_blocking=True)
        step.run()
        return step.logits.cpu()[slots[batch.wanted]]

    def _clear(self, inputs: torch.Tensor) -> None:
        """No slot has a row: all write to the place that belongs to no text."""
        inputs[0], inputs[1] = 0, self.max_length

    def _prepared(self, bounds: Bounds) -> _Step:
        on_gpu = self._device.type == "cuda"
        host = torch.empty(2, bounds.slots, dtype=torch.int64, pin_memory=on_gpu)
        self._clear(host)
        inputs = host.to(self._device, copy=True)
        logits = torch.empty(bounds.slots, self.vocab_size, device=self._device)
        last = torch.arange(bounds.slots, device=self._device)
        plan = SlotRows(inputs[1], bounds)

        def compute() -> None:
            logits.copy_(self._network.compute(self._slot_operations, inputs[0], plan, last))

        return _Step(host, inputs, logits, _captured(compute) if on_gpu else compute)


def _captured(compute: Callable[[], None]) -> Callable[[], None]:
    """What replays `compute` as a CUDA graph; runs it a few times before, as capturing asks for."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph.replay


def _bucket(count: int, least: int, most: int) -> int:
    """The power of two from `least` that holds `count`, or `most`."""
    return min(max(least, 1 << (count - 1).bit_length()), most)
