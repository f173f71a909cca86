"""From a model's parameters to its base model, and to the adapters that share the base's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch

from shapeshift import settings
from shapeshift.adapter_cache.interfaces import LengthPredictor, Prefetcher
from shapeshift.adapter_cache.lora.batch import LoraHook, LoraKernels
from shapeshift.adapter_cache.memory.cache import AdapterCache, OnFailure
from shapeshift.adapter_cache.memory.placement import SharedMemory
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs, SchedulingSettings, make_scheduler
from shapeshift.adapter_cache.registry.catalogue import Catalogue
from shapeshift.adapter_cache.registry.peft import BaseModel
from shapeshift.adapter_cache.registry.store import LAYOUT, read_multi_lora
from shapeshift.adapter_cache.settings import (
    EVICTION_RULES,
    HOST_TIERS,
    LORA_HOOKS,
    LORA_KERNELS,
    PREDICTORS,
    PREFETCHERS,
    AdapterCacheSettings,
    require_one_rank,
)
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, LinearHook, Runtime, blocks_of
from shapeshift.fused_decode.loading import Loaded
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.settings import FusedDecodeSettings, GeneratedDecodeSettings
from shapeshift.registry_mirror.follower import GeneratedRegistrySettings, RegistryFollower, RegistrySettings, follow
from shapeshift.serving.model_args import Log, ModelArgs
from shapeshift.serving.pb_utils import PbUtils

_PARAMETERS = (AdapterCacheSettings, SchedulingSettings, RegistrySettings, GeneratedRegistrySettings)


class SharedRuntime(Runtime, Protocol):
    """A runtime whose blocks share one buffer with adapters, and whose linears can add LoRA terms.

    memory  flat: the blocks, `block_elements` each, and behind them the reserve of the adapters
    """

    memory: torch.Tensor
    block_elements: int
    linear_hook: LinearHook | None


@dataclass(frozen=True)
class Adapters:
    """What a model whose requests may name adapters has beside its base model.

    text_blocks  of the longest text; they are never an adapter's
    prefetcher   None: nothing is predicted
    """

    cache: AdapterCache
    catalogue: Catalogue
    scheduler: Admission[Request]
    predictor: LengthPredictor
    prefetcher: Prefetcher | None
    follower: RegistryFollower
    runtime: SharedRuntime
    text_blocks: int

    def tokens(self, name: str | None) -> int:
        """The memory of an adapter in tokens of KV cache."""
        return _tokens(self.cache, self.runtime, name)


def load_base(args: ModelArgs, log: Log) -> Loaded:
    """The base model, with memory for adapters. Raises the errors of `shapeshift.errors`."""
    require_one_rank(settings.read(FusedDecodeSettings, args.parameters))
    extra_bytes = settings.read(AdapterCacheSettings, args.parameters).adapter_mb << 20
    return loading.load(args, log, partial(loading.load_runtime, extra_bytes=extra_bytes), _PARAMETERS)


def load(
    pb_utils: PbUtils, args: ModelArgs, base: Loaded, log: Log, on_change: Callable[[], None], on_failure: OnFailure
) -> Adapters:
    """The adapters that the parameters name. on_change, on_failure: see `AdapterCache`.

    Raises the errors of `shapeshift.errors`.
    """
    ours = settings.read(AdapterCacheSettings, args.parameters)
    scheduling = settings.read(SchedulingSettings, args.parameters)
    runtime = cast(SharedRuntime, base.runtime)
    text_blocks = blocks_of(runtime.max_length)
    on_gpu = args.kind == "GPU"
    kernels = _load_kernels(base, ours, runtime, on_gpu, log)
    cache = AdapterCache(
        SharedMemory(runtime.memory, base.pool, runtime.block_elements, text_blocks),
        rule=EVICTION_RULES[ours.eviction],
        caching=ours.caching,
        write=kernels.store,
        on_change=on_change,
        on_failure=on_failure,
        open_host=partial(HOST_TIERS["cuda"], ours.host_mb << 20) if on_gpu else None,
    )
    inputs = (runtime.memory, cache.places_of, kernels, cache.has_magnitudes)
    architecture = Architecture.read(base.folder)
    if kernels.fits_graphs:
        runtime.linear_hook = LORA_HOOKS["cuda"](*inputs, slots=runtime.slots, layers=architecture.layers)
    else:
        runtime.linear_hook = LoraHook(*inputs)
    folder = (args.folder / ours.adapters_dir).resolve()
    follower = follow(args.parameters, folder, LAYOUT, log)
    catalogue = Catalogue(
        folder,
        read_multi_lora(args.folder / "1"),
        _base_model(args.parameters, base.folder, architecture, ours),
        cache,
        runtime.memory.element_size(),
        log,
    )
    bounds = base.settings
    scheduler = make_scheduler(
        SchedulerInputs(
            scheduling,
            cache,
            bounds.queue_requests,
            bounds.queue_tokens,
            partial(_tokens, cache, runtime),
            BLOCK_TOKENS,
            classes=bounds.classes,
            overtaken_requests=bounds.overtaken_requests,
        )
    )
    log(f"{len(catalogue)} adapters, {kernels.name}, {ours.adapter_mb} MiB for them alone, {scheduling.scheduler}")
    return Adapters(
        cache,
        catalogue,
        scheduler,
        _predictor(pb_utils, ours, log),
        PREFETCHERS["gaps"]() if ours.prefetch else None,
        follower,
        runtime,
        text_blocks,
    )


def _load_kernels(
    base: Loaded, ours: AdapterCacheSettings, runtime: SharedRuntime, on_gpu: bool, log: Log
) -> LoraKernels:
    """Those of a GPU, where they prove right; the native ones on a CPU with a compiler; plain torch otherwise."""
    kernels: LoraKernels | None = None
    if on_gpu:
        kernels = LORA_KERNELS["grouped"](ours.max_rank, runtime.memory, log)
    elif base.settings.native:
        kernels = LORA_KERNELS["native"](base.kernel_cache, log)
    return kernels or LORA_KERNELS["torch"]()


def _base_model(
    parameters: Mapping[str, str], folder: Path, architecture: Architecture, ours: AdapterCacheSettings
) -> BaseModel:
    names = {folder.name, str(folder), *filter(None, ours.base_names.split(","))}
    sha256 = settings.read(GeneratedDecodeSettings, parameters).checkpoint_sha256
    return BaseModel(architecture, names, ours.max_rank, folder, sha256)


def _predictor(pb_utils: PbUtils, ours: AdapterCacheSettings, log: Log) -> LengthPredictor:
    if not ours.predictor_weights:
        return PREDICTORS["mean"]()
    return PREDICTORS["embedding"](pb_utils, ours.predictor_model, Path(ours.predictor_weights), log)


def _tokens(cache: AdapterCache, runtime: SharedRuntime, name: str | None) -> int:
    return -(-cache.elements(name) * BLOCK_TOKENS // runtime.block_elements)
