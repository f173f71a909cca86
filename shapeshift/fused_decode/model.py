"""A causal language model of the Llama family over a cache of slots: the runtime of the decode loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from shapeshift.fused_decode import native as native_kernels
from shapeshift.fused_decode import waiting
from shapeshift.fused_decode.adjust import Adjuster, Adjustment
from shapeshift.fused_decode.architecture import PRECISION_BYTES, Architecture
from shapeshift.fused_decode.cache import KeyValueCache
from shapeshift.fused_decode.fallback import TorchOperations
from shapeshift.fused_decode.linear import maker
from shapeshift.fused_decode.network import Network, assemble
from shapeshift.fused_decode.operations import Operations
from shapeshift.fused_decode.step import StepBatch
from shapeshift.fused_decode.weights import WeightFiles
from shapeshift.settings import require

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_warn = logging.getLogger(__name__).warning


class DecodeModel:
    """See `step.Runtime`. `adjuster` is asked what to add where a row has an adapter; None: no row may have one."""

    adjuster: Adjuster | None = None

    def __init__(self, network: Network, operations: Operations, cache: KeyValueCache) -> None:
        self.architecture = network.architecture
        self.operations = operations
        self.vocab_size = network.architecture.vocab_size
        self.eos_ids = network.architecture.eos_ids
        self.slots, self.max_length = cache.slots, cache.max_length
        self._network = network
        self._whole = operations.whole(network)
        self._cache = cache

    @property
    def memory(self) -> torch.Tensor:
        """What the slots lie in, flat: slot after slot, and then what was asked for beside them."""
        return self._cache.memory

    @property
    def slot_elements(self) -> int:
        """Elements of `memory` that a slot takes."""
        return self._cache.slot_elements

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
        beside: int = 0,
    ) -> DecodeModel:
        """The model of a checkpoint folder on this machine's CPU, with `slots` empty slots of `max_length` tokens.

        precision  f32 or bf16: of weights, cache and what passes between kernels
        threads    of torch, for the whole process
        native     false: plain torch instead of the native kernels
        cache_dir  where the compiled kernels are kept
        beside     elements of memory after the last slot, for other uses

        Raises InvalidInputError for a checkpoint or a setting that cannot be meant. What runs slower than it
        might is said through `log`.
        """
        require(precision in PRECISION_BYTES, "precision", precision, f"one of {', '.join(PRECISION_BYTES)}")
        require(threads >= 1, "threads", threads, "at least 1")
        torch.set_num_threads(threads)
        architecture = Architecture.read(checkpoint_dir)
        files = WeightFiles(checkpoint_dir, architecture)
        dtype = DTYPES[precision]

        def made() -> DecodeModel:
            cache = KeyValueCache(architecture, slots, max_length, dtype, beside=beside)
            compiled = native_kernels.load(cache_dir, log) if native else None
            make = native_kernels.NativeLinear if compiled and dtype == torch.float32 else maker(dtype, log)
            network = assemble(architecture, files, cache, dtype, make)
            return cls(network, compiled or TorchOperations(), cache)

        return waiting.passing(made)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `step.Runtime.forward`. Raises InvalidInputError for rows that do not fit the cache."""
        self._check(batch)
        with torch.inference_mode():
            return self._run(batch)

    def move(self, source: int, target: int, length: int) -> None:
        """See `step.Runtime.move`."""
        self._cache.move(source, target, length)

    def _run(self, batch: StepBatch) -> torch.Tensor:
        a = self.architecture
        plan = self.operations.plan(batch, a.kv_heads, a.heads // a.kv_heads)
        last = last_tokens(batch).to(batch.tokens.device)
        adjustment = self._adjustment(batch)
        if self._whole is not None:
            terms = None if adjustment is None else adjustment.low_rank(last)
            if adjustment is None or terms is not None:
                return self._whole(batch.tokens, plan, last, terms)
        return self._network.compute(self.operations, batch.tokens, plan, last, adjustment)

    def _adjustment(self, batch: StepBatch) -> Adjustment | None:
        if batch.adapters is None:
            return None
        require(self.adjuster is not None, "adapters", batch.adapters.tolist(), "None: this model has no adapters")
        assert self.adjuster is not None
        return self.adjuster.adjustment(batch)

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


def last_tokens(batch: StepBatch) -> torch.Tensor:
    """Place in `batch.tokens` of the last token of each wanted row, INT64 [wanted rows]."""
    return (batch.lengths.cumsum(0) - 1)[batch.wanted]
