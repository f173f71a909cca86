"""The service of a model whose requests may name LoRA adapters: the parts that it adds to the decode loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from shapeshift import settings
from shapeshift.adapter_cache.affinity import named_adapter
from shapeshift.adapter_cache.interfaces import LengthPredictor, PredictionInput
from shapeshift.adapter_cache.lora.batch import LoraHook, LoraKernels
from shapeshift.adapter_cache.memory.adapter_table import Adapter, unavailable
from shapeshift.adapter_cache.memory.cache import AdapterCache
from shapeshift.adapter_cache.memory.placement import SharedMemory
from shapeshift.adapter_cache.metrics import scheduler_metrics, state_metrics
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs, SchedulingSettings, make_scheduler
from shapeshift.adapter_cache.registry.catalogue import Catalogue
from shapeshift.adapter_cache.registry.peft import BaseModel
from shapeshift.adapter_cache.registry.store import LAYOUT, read_multi_lora
from shapeshift.adapter_cache.request import AdapterRequest
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
from shapeshift.fused_decode.engine.beams import require_memory
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, LinearHook, Runtime, blocks_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.fused_decode.request import LENGTH, STOP, Request
from shapeshift.fused_decode.service import OWN_PARAMETERS, DecodeService
from shapeshift.fused_decode.settings import FusedDecodeSettings, GeneratedDecodeSettings
from shapeshift.registry_mirror.follower import GeneratedRegistrySettings, RegistrySettings, follow
from shapeshift.serving.description import Description, registry_version
from shapeshift.serving.metrics import Metric
from shapeshift.serving.model_args import Log, ModelArgs
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, PbUtils

_REFRESH_S = 1.0
_PARAMETERS = (AdapterCacheSettings, SchedulingSettings, RegistrySettings, GeneratedRegistrySettings)


class SharedRuntime(Runtime, Protocol):
    """A runtime whose blocks share one buffer with adapters, and whose linears can add LoRA terms.

    memory  flat: the blocks, `block_elements` each, and behind them the reserve of the adapters
    """

    memory: torch.Tensor
    block_elements: int
    linear_hook: LinearHook | None


class AdapterService(DecodeService):
    """A decode service with adapters in a cache, a scheduler that knows them, and a registry that is watched."""

    own_parameters = (*OWN_PARAMETERS, "lora_name")
    # As in vLLM's backend.
    sampling_parameters = ("lora_name",)
    request_type = AdapterRequest

    def __init__(self, pb_utils: PbUtils, args: ModelArgs, log: Log) -> None:
        self._pb_utils = pb_utils
        self._settings = settings.read(AdapterCacheSettings, args.parameters)
        self._scheduling = settings.read(SchedulingSettings, args.parameters)
        require_one_rank(settings.read(FusedDecodeSettings, args.parameters))
        load_runtime = partial(loading.load_runtime, extra_bytes=self._settings.adapter_mb << 20)
        super().__init__(args, log, load_runtime, _PARAMETERS)
        self._log = log
        self._runtime = runtime = cast(SharedRuntime, self.loaded.runtime)
        self._lock = threading.Lock()
        self._live: dict[str, set[AdapterRequest]] = {}
        self._loop: DecodeLoop | None = None
        self._scheduler: Admission[Any] | None = None
        self._predictor = _make_predictor(pb_utils, self._settings, log)
        self._prefetcher = PREFETCHERS["gaps"]() if self._settings.prefetch else None
        self._kept_blocks = blocks_of(runtime.max_length)
        on_gpu = args.kind == "GPU"
        kernels = self._load_kernels(on_gpu)
        self.cache = AdapterCache(
            SharedMemory(runtime.memory, self.pool, runtime.block_elements, self._kept_blocks),
            rule=EVICTION_RULES[self._settings.eviction],
            caching=self._settings.caching,
            write=kernels.store,
            on_change=self._wake,
            on_failure=self._fail_waiting,
            open_host=partial(HOST_TIERS["cuda"], self._settings.host_mb << 20) if on_gpu else None,
        )
        given = (runtime.memory, self.cache.places_of, kernels, self.cache.has_magnitudes)
        layers = Architecture.read(self.loaded.folder).layers
        runtime.linear_hook = (
            LORA_HOOKS["cuda"](*given, slots=runtime.slots, layers=layers) if kernels.fits_graphs else LoraHook(*given)
        )
        folder = (args.folder / self._settings.adapters_dir).resolve()
        self._follower = follow(args.parameters, folder, LAYOUT, log)
        self.catalogue = Catalogue(
            folder,
            read_multi_lora(args.folder / "1"),
            self._base_model(args.parameters),
            self.cache,
            runtime.memory.element_size(),
            log,
        )
        if self._settings.stacked_ranks:
            log("stacked_ranks is deprecated and has no effect; remove it from config.pbtxt")
        log(
            f"{len(self.catalogue)} adapters, {kernels.name}, {self._settings.adapter_mb} MiB for them alone, "
            f"{self._scheduling.scheduler}"
        )
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._watch_registry, name="registry", daemon=True)

    def admission(self) -> Admission[Request]:
        bounds = self.loaded.settings
        self._scheduler = make_scheduler(
            SchedulerInputs(
                self._scheduling,
                self.cache,
                bounds.queue_requests,
                bounds.queue_tokens,
                self._adapter_tokens,
                BLOCK_TOKENS,
                classes=bounds.classes,
                overtaken_requests=bounds.overtaken_requests,
            )
        )
        return self._scheduler

    def describe(self) -> Description:
        hashes = {adapter.label: adapter.sha256 for adapter in self.catalogue.all()}
        return replace(super().describe(), adapters=sorted(hashes), registry=registry_version(hashes))

    def affinity(self, request: InferenceRequest) -> str:
        return named_adapter(self._pb_utils, request)

    def prepare(self, request: Request, given: RequestParameters) -> None:
        assert isinstance(request, AdapterRequest)
        request.slo_class = given.slo_class
        request.use(None if given.lora_name is None else self.catalogue.hold(given.lora_name))
        try:
            # Its adapter may hold all blocks but those that are kept, and does so while it is in use.
            held = blocks_of(self._adapter_tokens(request.adapter))
            require_memory(request, self.pool.count, held if held <= self.pool.count - self._kept_blocks else 0)
        except Exception:
            self._unhold(request)
            raise
        with self._lock:
            self._live.setdefault(request.adapter or "", set()).add(request)
            if request.adapter is not None:
                self.cache.metrics.requests.add(request.label)
                if self._prefetcher is not None:
                    self._prefetcher.record(request.adapter, request.arrived)

    def complete(self, request: Request, text: bytes, submit: Callable[[], None]) -> None:
        assert isinstance(request, AdapterRequest)

        def predicted(tokens: int) -> None:
            request.predicted_tokens = tokens
            submit()

        self._predictor.predict_later(_prediction_input(request, text), predicted)

    def forget(self, request: Request) -> None:
        assert isinstance(request, AdapterRequest)
        if request.finish_reason in (STOP, LENGTH):
            self._predictor.learn(_prediction_input(request), request.generated)
        with self._lock:
            live = self._live.get(request.adapter or "", set())
            live.discard(request)
            if not live:
                self._live.pop(request.adapter or "", None)
        self._unhold(request)

    def exported(self) -> list[Metric]:
        cache = self.cache
        return [
            *cache.metrics.exported,
            *state_metrics(
                self._running_and_waiting,
                self._runtime.slots,
                registered=lambda: len(self.catalogue),
                resident=lambda: len(cache.resident_names()),
                vacant_bytes=lambda: cache.free_reserve_bytes,
            ),
            *scheduler_metrics(self._scheduler),
            *self._follower.metrics,
        ]

    def open(self, loop: DecodeLoop) -> None:
        self._loop = loop
        self._watch.start()
        loop.wake()

    def close(self) -> None:
        self._follower.close()
        self._stop.set()
        self._watch.join(5.0)
        self._predictor.close()
        self.cache.close()
        super().close()

    def _load_kernels(self, on_gpu: bool) -> LoraKernels:
        """Those of a GPU, where they prove right; the native ones on a CPU with a compiler; plain torch otherwise."""
        kernels: LoraKernels | None = None
        if on_gpu:
            kernels = LORA_KERNELS["grouped"](self._settings.max_rank, self._runtime.memory, self._log)
        elif self.loaded.settings.native:
            kernels = LORA_KERNELS["native"](self.loaded.kernel_cache, self._log)
        return kernels or LORA_KERNELS["torch"]()

    def _base_model(self, parameters: Mapping[str, str]) -> BaseModel:
        folder = self.loaded.folder
        names = {folder.name, str(folder), *filter(None, self._settings.base_names.split(","))}
        sha256 = settings.read(GeneratedDecodeSettings, parameters).checkpoint_sha256
        return BaseModel(Architecture.read(folder), names, self._settings.max_rank, folder, sha256)

    def _unhold(self, request: AdapterRequest) -> None:
        if request.adapter is not None:
            self.cache.table.unhold(request.adapter)

    def _adapter_tokens(self, name: str | None) -> int:
        """The memory of an adapter in tokens of KV cache."""
        return -(-self.cache.elements(name) * BLOCK_TOKENS // self._runtime.block_elements)

    def _running_and_waiting(self) -> tuple[list[str], list[str]]:
        """Labels of the adapters that requests run with, and that requests wait for."""
        with self._lock:
            live = [request for requests in self._live.values() for request in requests if request.label]
        running = {request.label for request in live if request.slot is not None}
        waiting = {request.label for request in live if request.slot is None and not request.is_finished}
        return sorted(running), sorted(waiting)

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def _fail_waiting(self, adapter: Adapter, error: Exception) -> None:
        reason = unavailable(f"adapter {adapter.label} could not be loaded", error)
        self._log(str(reason))
        with self._lock:
            waiting = [request for request in self._live.get(adapter.name, ()) if request.slot is None]
        for request in waiting:
            if self._loop is not None:
                self._loop.end(request, reason)

    def _watch_registry(self) -> None:
        while not self._stop.wait(_REFRESH_S):
            try:
                has_changed = self.catalogue.refresh()
                has_changed = self._prefetch() or has_changed
            except Exception as error:  # noqa: BLE001  one failure must not end the thread
                self._log(f"the check for changed adapters failed: {type(error).__name__}: {error}")
                continue
            if has_changed:
                self._wake()

    def _prefetch(self) -> bool:
        """Pass the adapters for which requests are predicted to the cache; whether there are any."""
        if self._prefetcher is None:
            return False
        infos = [adapter.info for adapter in self.catalogue.all()]
        with self._lock:
            names = self._prefetcher.plan(
                infos, self.cache.resident_names(), self.cache.free_reserve_bytes, time.monotonic()
            )
        for name in names:
            self.cache.preload.prefetch(name)
        return bool(names)


def _make_predictor(pb_utils: PbUtils, own: AdapterCacheSettings, log: Log) -> LengthPredictor:
    if not own.predictor_weights:
        return PREDICTORS["mean"]()
    return PREDICTORS["embedding"](pb_utils, own.predictor_model, Path(own.predictor_weights), log)


def _prediction_input(request: AdapterRequest, text: bytes = b"") -> PredictionInput:
    return PredictionInput(request.adapter, request.prompt_tokens, request.max_new_tokens, text=text)
