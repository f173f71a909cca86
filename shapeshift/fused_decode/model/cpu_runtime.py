"""A causal language model over a cache of blocks: the decode loop's runtime on a CPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from shapeshift.engines.hardware import cores, give_back_freed_memory
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, CopyStates, LinearDelta, LinearHook, StepBatch, blocks_of
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.assembly import WeightStore, assemble, linear_makers
from shapeshift.fused_decode.model.kv_cache import KeyValueCache
from shapeshift.fused_decode.model.network import AttentionLayer, Network, Operations
from shapeshift.fused_decode.model.shared_weights import key_of, shared_weights
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.settings import KV_PRECISIONS, ON_CPU, FusedDecodeSettings, computed
from shapeshift.serving.model_args import Log
from shapeshift.settings import Choices, require

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
OPERATIONS: Choices[Any] = Choices(
    "native", {"false": "shapeshift.fused_decode.model.torch_operations:TorchOperations"}
)
"""What computes where there are no native operations."""
T = TypeVar("T")
warn = logging.getLogger(__name__).warning


def load(
    folder: Path,
    decode: FusedDecodeSettings,
    *,
    precision: str,
    device: str,
    kernel_cache: Path,
    extra_elements: int,
    checkpoint_sha256: str,
    log: logging.Logger,
) -> DecodeModel:
    """The model that the settings `decode` describe; see `DecodeModel.load`. device: always "cpu"."""
    threads = decode.threads or cores()
    model = DecodeModel.load(
        folder,
        ModelOptions(
            precision=precision,
            group_size=decode.group_size,
            kv_precision=decode.kv_precision,
            slots=decode.max_concurrency,
            max_length=decode.max_length,
            blocks=blocks_of(decode.kv_cache_tokens),
            threads=threads,
            native=decode.native,
            cache_dir=kernel_cache,
            extra_elements=extra_elements,
            checkpoint_sha256=checkpoint_sha256 if decode.share_weights else "",
        ),
        log.warning,
    )
    log.info(f"{model.architecture.family}, {precision}, {model.operations.name} kernels, {threads} threads")
    return model


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded, for `slots` texts of `max_length` tokens.

    precision       f32 or bf16: of weights, cache and activations; or int8 or int4: of the weights of linears
    threads         of torch, for the whole process
    cache_dir       folder of the compiled kernels, and of packed weights
    group_size      inputs of an output that share a scale in int4; 0: 128 where that divides them, else 32
    kv_precision    of the cache: see `settings.KV_PRECISIONS`
    blocks          of the cache; 0: enough for all these texts
    native          false: plain torch instead of the native kernels
    extra_elements  elements of memory after the last block, for other uses
    checkpoint_sha256  of the checkpoint: its packed weights are shared with other processes; empty: they are not
    """

    precision: str
    slots: int
    max_length: int
    threads: int
    cache_dir: Path
    group_size: int = 0
    kv_precision: str = "auto"
    blocks: int = 0
    native: bool = True
    extra_elements: int = 0
    checkpoint_sha256: str = ""


class DecodeModel:
    """See `interfaces.Runtime`.

    fused_forward  the forward pass of `network` as one operation; None: it goes from layer to layer
    linear_hook    supplies the terms of rows with adapters; None: no row may have one
    """

    linear_hook: LinearHook | None = None
    longest_step_s: float = 0.0
    feed: Callable[[torch.Tensor], None] | None = None

    def __init__(self, network: Network, operations: Operations, cache: KeyValueCache) -> None:
        self.architecture = network.architecture
        self.operations = operations
        self.vocab_size = network.architecture.vocab_size
        self.eos_ids = network.architecture.eos_ids
        self.slots, self.max_length, self.blocks = cache.slots, cache.max_length, cache.blocks
        # The state of a text is known at its end alone.
        self.shares_prefixes = not cache.has_own_tables and cache.states is None
        self.copy_states: CopyStates | None = None if cache.states is None else cache.states.copy
        self.network = network
        self.fused_forward = operations.fused_forward(network)
        self.cache = cache
        attentions = (layer.attention for layer in network.layers)
        self._kv_heads = {one.keys.shape[1] for one in attentions if isinstance(one, AttentionLayer)}
        self._checked: StepBatch | None = None

    @property
    def memory(self) -> torch.Tensor:
        """The memory of the cache, flat: block after block, then the extra elements."""
        return self.cache.memory

    @property
    def block_elements(self) -> int:
        """Elements of `memory` that a block takes."""
        return self.cache.block_elements

    @classmethod
    def load(cls, checkpoint_dir: Path, options: ModelOptions, log: Log = warn) -> DecodeModel:
        """The model of a checkpoint folder on this machine's CPU.

        Raises InvalidInputError for an invalid checkpoint or option. Logs what runs slower than it could.
        """
        require(options.precision in ON_CPU, "precision", options.precision, f"one of {', '.join(ON_CPU)}")
        allowed = f"one of {', '.join(KV_PRECISIONS)}"
        require(options.kv_precision in KV_PRECISIONS, "kv_precision", options.kv_precision, allowed)
        require(options.threads >= 1, "threads", options.threads, "at least 1")
        torch.set_num_threads(options.threads)
        architecture = Architecture.read(checkpoint_dir)
        files = WeightFiles(checkpoint_dir, architecture)
        return in_temporary_thread(lambda: cls._build(architecture, files, options, log))

    @classmethod
    def _build(cls, architecture: Architecture, files: WeightFiles, options: ModelOptions, log: Log) -> DecodeModel:
        precision, cache_dir = options.precision, options.cache_dir
        dtype = DTYPES[computed(precision)]
        cache = KeyValueCache(
            architecture,
            options.slots,
            options.max_length,
            dtype,
            blocks=options.blocks,
            kv_precision=options.kv_precision,
            extra_elements=options.extra_elements,
        )
        compiled = native_operations.load(cache_dir, log) if options.native else None
        make = linear_makers(precision, options.group_size, dtype, compiled is not None)

        def build(weights: WeightStore) -> Network:
            return assemble(architecture, files, cache, dtype, make, weights)

        if compiled is not None and options.checkpoint_sha256:
            way = f"{precision}-{options.group_size}-{computed(precision)}"
            network = shared_weights(key_of(options.checkpoint_sha256, way, cache_dir), cache_dir, log, build)
        else:
            network = build(WeightStore())
        return cls(network, compiled or OPERATIONS["false"](), cache)

    def ready(self) -> bool:
        """See `interfaces.Runtime.ready`: always."""
        return True

    def close(self) -> None:
        """See `interfaces.Runtime.close`: there is nothing."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `interfaces.Runtime.forward`. Raises InvalidInputError for rows that do not fit the cache."""
        # The kernels check places too.
        if batch is not self._checked:
            self._check(batch)
            self._checked = batch
        if batch.blocks is None:
            batch = dataclasses.replace(batch, blocks=self.cache.own_blocks(batch.slots))
        if self.cache.has_own_tables:
            self._begin(batch)
        with torch.inference_mode():
            return self._run(batch)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `interfaces.Runtime.copy_blocks`."""
        self.cache.copy_blocks(sources, targets)

    def _run(self, batch: StepBatch) -> torch.Tensor:
        linear_delta = self._linear_delta(batch)
        if self.fused_forward is not None:
            low_rank = None if linear_delta is None else linear_delta.low_rank(last_tokens(batch))
            if linear_delta is None or low_rank is not None:
                return self.fused_forward(batch, low_rank)
        plan = self.operations.plan(batch, *self._kv_heads)
        last = last_tokens(batch).to(batch.tokens.device)
        places = token_places(batch).to(batch.tokens.device)
        runs = None if self.cache.states is None else self.cache.states.advance(batch)
        return self.network.forward(self.operations, batch.tokens, places, plan, last, linear_delta, runs)

    def _begin(self, batch: StepBatch) -> None:
        """Tell the cache how long the texts can be; one may also go on from a text of another slot, as beams do."""
        if batch.spans is None:
            begun = (batch.starts == 0).nonzero()[:, 0]
            slots, spans = batch.slots[begun], batch.lengths[begun]
        else:
            slots, spans = batch.slots, batch.spans
        for slot, length in zip(slots.tolist(), spans.tolist(), strict=True):
            self.cache.begin(slot, length)

    def _linear_delta(self, batch: StepBatch) -> LinearDelta | None:
        if batch.adapters is None:
            return None
        require(
            self.linear_hook is not None, "adapters", batch.adapters.tolist(), "None: this model serves no adapters"
        )
        assert self.linear_hook is not None
        return self.linear_hook.linear_delta(batch)

    def _check(self, batch: StepBatch) -> None:
        slots, starts, lengths = batch.slots.tolist(), batch.starts.tolist(), batch.lengths.tolist()
        require(len(slots) >= 1, "rows", len(slots), "at least 1")
        require(min(slots) >= 0 and max(slots) < self.slots, "slots", slots, f"0 to {self.slots - 1}")
        require(len(set(slots)) == len(slots), "slots", slots, "each slot once")
        require(min(starts) >= 0, "starts", starts, "0 or more")
        require(min(lengths) >= 1, "lengths", lengths, "at least 1")
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        require(max(ends) <= self.max_length, "starts + lengths", ends, f"at most max_length ({self.max_length})")
        if batch.blocks is not None:
            holds = batch.blocks.shape[1] * BLOCK_TOKENS
            require(max(ends) <= holds, "starts + lengths", ends, f"at most what the blocks hold ({holds})")
            blocks = batch.blocks.numpy()
            numbers = int(blocks.min()), int(blocks.max())
            require(
                numbers[0] >= 0 and numbers[1] < self.cache.blocks, "blocks", numbers, f"0 to {self.cache.blocks - 1}"
            )
        total = sum(lengths)
        require(batch.tokens.shape[0] == total, "tokens", batch.tokens.shape[0], f"{total}, the sum of lengths")


def last_tokens(batch: StepBatch) -> torch.Tensor:
    """The places in `batch.tokens` after which logits are wanted: the last of each wanted row, then further ones."""
    # By numpy, as in `_check`: of a step of one row torch's small operations would take a tenth of a millisecond.
    last = torch.from_numpy((np.cumsum(batch.lengths.numpy(), dtype=np.int64) - 1)[batch.logit_rows.numpy()])
    return last if batch.further is None else torch.cat([last, batch.further])


def token_places(batch: StepBatch) -> torch.Tensor:
    """The place of each token in its text, INT64 [tokens]."""
    lengths = batch.lengths.long()
    firsts = lengths.cumsum(0) - lengths
    return torch.arange(batch.tokens.shape[0]) + (batch.starts - firsts).repeat_interleave(lengths)


def in_temporary_thread(work: Callable[[], T]) -> T:
    """The result of `work`, called on a thread that ends with it; what it has freed goes back to the system.

    Every thread that computes keeps its own pool of OpenMP threads until it ends. With more threads than cores, all of
    them sleep at once when they wait, also those of the decoding thread: a step then takes a third longer.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="temporary") as executor:
        result = executor.submit(work).result()
    give_back_freed_memory()
    return result
