"""The decode step on an NVIDIA GPU, as CUDA graphs.

Run on an H200. The captured code is plain torch but for attention, where `graphs.gpu_kernels` reads the blocks of the
cache, and for norms and gates (`graphs.row_kernels`); tests compare both with the other runtime on a CPU, where these
kernels are interpreted.

A step has one of few shapes: `graphs.bounds`. Its rows are single tokens, behind which there may be one chunk of a
prompt, and each text has as many places as the longest needs, all rounded up. So one graph for each of the bounds is
enough: of common ones it is captured at load (`capture`), of others with their first step. What a step needs is
copied into the inputs of its graph. The logits stay on the device, where tokens are sampled: the only wait is for what
is chosen. The next step may be given before that: tokens that are not known here yet are read on the device, where the
last ones of all slots are kept.

What rounding adds repeats a token of the step: it writes what that writes, once more to the same place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from logging import Logger
from pathlib import Path
from typing import Any

import torch

from shapeshift.engines import cuda_device
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, GraphHook, StepBatch, blocks_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.assembly import LinearMakers, assemble
from shapeshift.fused_decode.model.cpu_runtime import DTYPES, DecodeModel, warn
from shapeshift.fused_decode.model.graphs.bounds import (
    CHUNKS,
    LEAST_CONTEXT,
    GraphBounds,
    bounds_of,
    mixed_rows,
    power_of_two,
)
from shapeshift.fused_decode.model.graphs.device_memory import require_room
from shapeshift.fused_decode.model.graphs.step import GraphStep, new_pool
from shapeshift.fused_decode.model.graphs.verify import kernels_for, step_kernels
from shapeshift.fused_decode.model.kv_cache import KeyValueCache
from shapeshift.fused_decode.model.network import Network
from shapeshift.fused_decode.model.torch_operations import PLAIN, PlainLinear, StepKernels, TorchOperations
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import FusedDecodeSettings
from shapeshift.serving.model_args import Log
from shapeshift.settings import require

_MOST_S = 30.0
"""Seconds after which no further graph is begun: a model must become ready."""


def load(
    folder: Path,
    decode: FusedDecodeSettings,
    *,
    precision: str,
    device: str,
    kernel_cache: Path,
    extra_elements: int,
    checkpoint_sha256: str,
    log: Logger,
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
        log=log.warning,
    )
    log.info(f"{model.architecture.family}, {precision}, {device}, {model.kernels.name} kernels")
    if torch.device(device).type == "cuda":
        in_place, index = model.kernels is not PLAIN, torch.device(device).index
        most = require_room(model.architecture, decode, precision, in_place, index, log.warning)
        model.capture_common(decode.prefill_tokens, most, lambda: torch.cuda.memory_reserved(device), log.info)
    return model


class GraphedModel(DecodeModel):
    """See `interfaces.Runtime`. Steps that `graphs.bounds.bounds_of` leaves out run without a graph. Logits are on the
    device.

    uses_graphs: False computes every step without a graph.
    kernels: of all steps; graphs: those captured so far; longest: places of the longest text.
    """

    uses_graphs: bool = True

    def __init__(self, network: Network, cache: KeyValueCache, kernels: StepKernels | None = None) -> None:
        """kernels: None: those for the device of the cache."""
        self._device = cache.device
        self.kernels = kernels or step_kernels(self._device.type == "cuda")
        super().__init__(network, TorchOperations(self._device, self.kernels), cache)
        self.graphs: dict[GraphBounds, GraphStep] = {}
        self.longest = cache.text_blocks * BLOCK_TOKENS
        self._pool: Any = new_pool() if self._device.type == "cuda" else None
        self._latest = torch.zeros(self.slots, dtype=torch.int64, device=self._device)
        self._wanted_slots = self._latest[:0]
        self.feed = self._feed

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
        kernels: StepKernels | None = None,
        log: Log = warn,
    ) -> GraphedModel:
        """The model of a checkpoint folder on `device`, such as "cuda:0"; the rest as for `DecodeModel.load`.

        kernels: None: those for the device, where they prove right there.

        Raises InvalidInputError as `DecodeModel.load` does, and the errors of `cuda_device.require_usable`.
        """
        if torch.device(device).type == "cuda":
            cuda_device.require_usable(torch.device(device).index or 0)
        require(precision in DTYPES, "precision", precision, f"one of {', '.join(DTYPES)}")
        architecture, dtype = Architecture.read(checkpoint_dir), DTYPES[precision]
        if (experts := architecture.experts) is not None:
            allowed = f"0 on a GPU: the experts of {architecture.family} are for CPUs"
            raise InvalidInputError(experts.key, experts.count, allowed)
        varied = "model_type", architecture.family, "a decoder whose layers are alike on a GPU"
        require(not architecture.varied, *varied)
        files = WeightFiles(checkpoint_dir, architecture)
        cache = KeyValueCache(
            architecture, slots, max_length, dtype, blocks=blocks, device=device, extra_elements=extra_elements
        )
        network = assemble(architecture, files, cache, dtype, LinearMakers(PlainLinear, PlainLinear, dtype))
        return cls(network, cache, kernels or kernels_for(network, cache.device, log))

    def capture_common(self, prefill_tokens: int, most_bytes: float, used_bytes: Callable[[], float], log: Log) -> None:
        """Capture the graphs of `common_bounds`; see `capture`. No text may be in the cache."""
        bounds = common_bounds(self.slots, self.max_length, self.longest, prefill_tokens)
        steps = [step_within(one, self.slots, self.max_length) for one in bounds]
        capture(self.forward, steps, most_bytes, used_bytes, log)

    def _feed(self, tokens: torch.Tensor) -> None:
        """See `interfaces.Runtime.feed`."""
        self._latest[self._wanted_slots] = tokens

    def _run(self, batch: StepBatch) -> torch.Tensor:
        if not self.uses_graphs:
            return self._run_eagerly(batch)
        hook = self.linear_hook if batch.adapters is not None and isinstance(self.linear_hook, GraphHook) else None
        bounds = bounds_of(batch, self.slots, self.longest, 0 if hook is None else hook.linears(batch))
        return self._run_eagerly(batch) if bounds is None else self._run_graph(batch, bounds, hook)

    def _run_eagerly(self, batch: StepBatch) -> torch.Tensor:
        slots = batch.slots.long()
        self._wanted_slots = slots[batch.logit_rows].to(self._device)
        tokens = batch.tokens.to(self._device)
        if batch.fed is not None:
            owners = slots.repeat_interleave(batch.lengths.long()).to(self._device)
            tokens = torch.where(batch.fed.to(self._device), self._latest[owners], tokens)
        return super()._run(dataclasses.replace(batch, tokens=tokens))

    def _run_graph(self, batch: StepBatch, bounds: GraphBounds, hook: GraphHook | None) -> torch.Tensor:
        if bounds not in self.graphs or self.graphs[bounds].hook is not hook:
            self.graphs[bounds] = GraphStep(bounds, self.network, self._latest, self._pool, batch, self.kernels, hook)
        logits, self._wanted_slots = self.graphs[bounds].run(batch)
        return logits


# The graphs that are captured when a model is loaded, so that no request waits for them: those of common steps. Common
# are the steps of prompts that one chunk holds, and of texts that are not yet longer than such a prompt.


def common_bounds(slots: int, max_length: int, longest: int, prefill_tokens: int) -> list[GraphBounds]:
    """The bounds of common steps, the largest first: the others find the memory that they compute in in its.

    slots, longest: see `bounds.bounds_of`; max_length: most tokens of a text; prefill_tokens: most tokens of prompts in
    a step.
    """
    prompt = min(prefill_tokens, max_length)
    chunks = [chunk for least, chunk in zip((1, *CHUNKS), CHUNKS, strict=False) if least < prompt]
    contexts = {power_of_two(chunk, LEAST_CONTEXT, longest) for chunk in (LEAST_CONTEXT, *chunks)}
    rows = {power_of_two(count, 1, slots) for count in range(1, slots + 1)}
    beside = {mixed_rows(singles, slots) for singles in range(slots)}
    bounds = {GraphBounds(count, context) for count in rows for context in contexts}
    bounds |= {GraphBounds(count, power_of_two(c, LEAST_CONTEXT, longest), c) for count in beside for c in chunks}
    return sorted(bounds, key=lambda one: (one.rows + one.chunk, one.context), reverse=True)


def step_within(bounds: GraphBounds, slots: int, max_length: int) -> StepBatch:
    """A step that these bounds of `common_bounds` hold, and no smaller ones. It writes into the first blocks."""
    rows = min(bounds.rows, slots - bool(bounds.chunk))
    lengths = torch.ones(rows + bool(bounds.chunk), dtype=torch.int32)
    starts = torch.full_like(lengths, min(bounds.context, max_length) - 1)
    if bounds.chunk:
        lengths[-1], starts[-1] = min(bounds.chunk, max_length), 0
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    blocks = torch.arange(blocks_of(bounds.context), dtype=torch.int32).repeat(len(numbers), 1)
    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    return StepBatch(tokens, numbers, starts, lengths, numbers.long(), spans=starts + lengths, blocks=blocks)


def capture(
    run: Callable[[StepBatch], object],
    steps: Sequence[StepBatch],
    most_bytes: float,
    used_bytes: Callable[[], float],
    log: Log,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run these steps, whose graphs are captured by that, until _MOST_S seconds or `most_bytes` are spent.

    used_bytes: of the device, by this process. Raises what `run` raises, such as EngineError for a full GPU.
    """
    began, before = clock(), used_bytes()
    for count, step in enumerate(steps):
        took, taken = clock() - began, used_bytes() - before
        spent = f"{_MOST_S:.0f} s are spent" if took >= _MOST_S else f"{most_bytes / 2**20:.0f} MiB are planned"
        if took >= _MOST_S or taken >= most_bytes:
            log(f"{count} of {len(steps)} graphs captured in {took:.1f} s, {spent}; the others with their first steps")
            return
        run(step)
    log(f"{len(steps)} graphs captured in {clock() - began:.1f} s; others with their first steps")
