"""The decode step on an NVIDIA GPU, as CUDA graphs.

Written to the documented interface of torch.cuda; we have not run the capture and replay of graphs. The captured
code is plain torch, and tests compare it with the other runtime on a CPU.

A step in which every row is one token has fixed shapes: its rows, their number rounded up to a power of two, and as
many places of each text as the longest needs, rounded up too. So one graph for each pair of bounds is enough. Tokens,
positions, slots and blocks are copied into its inputs, and the only wait for the GPU is for the logits.

The rows that rounding adds repeat the first one: they write what it writes, once more to the same place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch, blocks_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cpu_runtime import DTYPES, DecodeModel
from shapeshift.fused_decode.model.kv_cache import KeyValueCache
from shapeshift.fused_decode.model.linear import PlainLinear
from shapeshift.fused_decode.model.network import LinearMakers, Network, assemble
from shapeshift.fused_decode.model.operations import (
    AttentionLayer,
    TorchOperations,
    gather,
    mix,
    norm_heads,
    rotate,
    store,
    visible,
)
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import FusedDecodeSettings
from shapeshift.serving.model_args import Log
from shapeshift.settings import require

_LEAST_CONTEXT = 64
_WARM_UPS = 3


def load(
    folder: Path,
    decode: FusedDecodeSettings,
    *,
    precision: str,
    device: str,
    kernel_cache: Path,
    extra_elements: int,
    log: Log,
) -> GraphedModel:
    """The model that the settings `decode` describe, on `device`; see `GraphedModel.load_on`. Compiles no kernels."""
    model = GraphedModel.load_on(
        device,
        folder,
        precision=precision,
        slots=decode.max_concurrency,
        max_length=decode.max_length,
        blocks=blocks_of(decode.kv_cache_tokens),
        extra_elements=extra_elements,
    )
    log(f"{model.architecture.family}, {precision}, {device}")
    return model


@dataclass(frozen=True)
class GraphBounds:
    """The steps that one graph computes: `rows` rows, and `context` places of each text."""

    rows: int
    context: int


@dataclass(frozen=True)
class SingleTokens:
    """The plan of a step of single tokens, INT64 [rows] each; blocks: INT64 [rows, n], those of each text."""

    positions: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor


class GraphOperations(TorchOperations):
    """Plain torch for a plan of SingleTokens: its shapes depend on bounds alone, and it never waits for the device."""

    def attention(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        parts = qkv.float().view(len(qkv), 1, -1, head_dim)
        query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], dim=2)
        positions, slots = plan.positions[:, None], plan.slots[:, None]
        query = rotate(norm_heads(query, layer.query_norm, layer.eps), slots, positions, layer)
        key = rotate(norm_heads(key, layer.key_norm, layer.eps), slots, positions, layer)
        store(key, layer.keys, plan.blocks, positions)
        store(value, layer.values, plan.blocks, positions)
        seen = visible(layer, positions, plan.blocks.shape[1] * BLOCK_TOKENS)
        keys, values = (gather(cache, plan.blocks, seen) for cache in (layer.keys, layer.values))
        mixed = mix(query.transpose(1, 2).to(keys.dtype), keys, values, seen[:, None], layer)
        return mixed.flatten(1).to(qkv.dtype)


@dataclass(frozen=True)
class _Step:
    """One step within bounds: `run` computes `logits` from `inputs`, both at fixed addresses.

    host    INT64 [rows, 3 + n]  token, position, slot and blocks of each row (see `SingleTokens`), in memory of the CPU
    inputs  INT64 [rows, 3 + n]  the same on the device
    logits  FLOAT32 [rows, vocab_size]
    """

    host: torch.Tensor
    inputs: torch.Tensor
    logits: torch.Tensor
    run: Callable[[], None]


class GraphedModel(DecodeModel):
    """See `interfaces.Runtime`. Steps with a prompt chunk or an adapter run without a graph. Logits are on the CPU."""

    def __init__(self, network: Network, cache: KeyValueCache) -> None:
        self._device = cache.keys.device
        super().__init__(network, TorchOperations(self._device), cache)
        self._graph_operations = GraphOperations(self._device)
        self._steps: dict[GraphBounds, _Step] = {}
        self._longest = cache.text_blocks * BLOCK_TOKENS

    @classmethod
    def load_on(
        cls,
        device: str,
        checkpoint_dir: Path,
        *,
        precision: str = "bf16",
        slots: int,
        max_length: int,
        blocks: int = 0,
        extra_elements: int = 0,
    ) -> GraphedModel:
        """The model of a checkpoint folder on `device`, such as "cuda:0"; the rest as for `DecodeModel.load`.

        Raises InvalidInputError as `DecodeModel.load` does, UnsupportedError where torch finds no such device.
        """
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UnsupportedError(f"device {device}: torch finds no CUDA device")
        require(precision in DTYPES, "precision", precision, f"one of {', '.join(DTYPES)}")
        architecture, dtype = Architecture.read(checkpoint_dir), DTYPES[precision]
        files = WeightFiles(checkpoint_dir, architecture)
        cache = KeyValueCache(
            architecture, slots, max_length, dtype, blocks=blocks, device=device, extra_elements=extra_elements
        )
        return cls(assemble(architecture, files, cache, dtype, LinearMakers(PlainLinear, PlainLinear, dtype)), cache)

    def _run(self, batch: StepBatch) -> torch.Tensor:
        if int(batch.lengths.max()) > 1 or batch.adapters is not None or batch.further is not None:
            moved = dataclasses.replace(batch, tokens=batch.tokens.to(self._device))
            return super()._run(moved).cpu()
        assert batch.blocks is not None
        count = len(batch.slots)
        bounds = GraphBounds(
            _bucket(count, 1, self.slots), _bucket(int(batch.starts.max()) + 1, _LEAST_CONTEXT, self._longest)
        )
        columns = (batch.tokens, batch.starts, batch.slots)
        given = torch.cat([torch.stack(columns, 1).long(), batch.blocks[:, : bounds.context // BLOCK_TOKENS].long()], 1)
        host = torch.zeros(bounds.rows, 3 + bounds.context // BLOCK_TOKENS, dtype=torch.int64)
        host[:, : given.shape[1]] = given[0]
        host[:count, : given.shape[1]] = given
        if bounds not in self._steps:
            self._steps[bounds] = self._prepare(bounds, host)
        step = self._steps[bounds]
        step.host.copy_(host)
        step.inputs.copy_(step.host, non_blocking=True)
        step.run()
        return step.logits.cpu()[batch.wanted]

    def _prepare(self, bounds: GraphBounds, given: torch.Tensor) -> _Step:
        """given: the inputs of the first step, with which the capture computes."""
        on_gpu = self._device.type == "cuda"
        host = given.pin_memory() if on_gpu else given.clone()
        inputs = host.to(self._device, copy=True)
        logits = torch.empty(bounds.rows, self.vocab_size, device=self._device)
        last = torch.arange(bounds.rows, device=self._device)
        tokens, positions, slots = inputs[:, :3].T
        plan = SingleTokens(positions, slots, inputs[:, 3:])

        def compute() -> None:
            logits.copy_(self._network.forward(self._graph_operations, tokens, positions, plan, last))

        return _Step(host, inputs, logits, _capture(compute) if on_gpu else compute)


def _capture(compute: Callable[[], None]) -> Callable[[], None]:
    """A function that replays `compute` as a CUDA graph, captured after a few warm-up runs."""
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
    """The smallest power of two that is at least `count` and `least`; at most `most`."""
    return min(max(least, 1 << (count - 1).bit_length()), most)
