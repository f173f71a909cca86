"""The front of a model that generates, whose requests may name LoRA adapters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any, cast

from shapeshift import settings
from shapeshift.adapter_cache.lora.batch import LoraHook, LoraKernels, require_plain_layers
from shapeshift.adapter_cache.memory.adapter_table import Adapter
from shapeshift.adapter_cache.memory.placement import SharedMemory
from shapeshift.adapter_cache.policy.length_prediction import (
    LengthPredictor,
    PredictionInput,
    RunningMean,
    WordRegressor,
)
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs
from shapeshift.adapter_cache.registry.catalogue import ServedAdapters, requests_info
from shapeshift.adapter_cache.registry.peft import BaseModel
from shapeshift.adapter_cache.settings import (
    HOST_TIERS,
    LORA_HOOKS,
    LORA_KERNELS,
    SCHEDULERS,
    AdapterCacheSettings,
    require_one_rank,
)
from shapeshift.errors import OverloadedError
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, Runtime, blocks_of
from shapeshift.fused_decode.job import GenerateJob
from shapeshift.fused_decode.loading import Loaded
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel
from shapeshift.fused_decode.request import LENGTH, STOP, TOO_LATE, Reason, Request
from shapeshift.fused_decode.settings import FusedDecodeSettings, GeneratedDecodeSettings
from shapeshift.loops import Loop
from shapeshift.serving.description import Description
from shapeshift.serving.front import Client, RequestLine, Trace
from shapeshift.serving.metrics import Metric
from shapeshift.serving.model_args import ModelArgs, model_log
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, PbUtils

_NAME, _SAMPLING = "lora_name", "sampling_parameters"


@dataclass(eq=False, slots=True)
class AdapterRequest(Request):
    """A request that may name an adapter, see `policy.scheduling.SizedRequest`; `LoraFront` sets what it adds.

    adapter, label, rank: the adapter's unique name, the name that clients use, and its rank; None, "", 0 without one.
    source: the record of the adapter.
    """

    adapter: str | None = None
    label: str = ""
    rank: int = 0
    predicted_tokens: int = 0
    source: Adapter | None = None

    def use(self, adapter: Adapter) -> None:
        """Generate with `adapter`, not with the base model."""
        self.adapter, self.label, self.rank = adapter.name, adapter.label, adapter.info.rank
        self.adapter_id = adapter.number
        self.source = adapter

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)


class LoraFront(GenerateFront):
    """Generates with adapters in a cache, a scheduler that knows them, and a registry that is watched.

    A job holds its adapter from `parse` to `answered`; the lengths of its answers are predicted before it is queued.
    """

    takes = (*GenerateFront.takes, _NAME)
    # As in vLLM's backend.
    sampling_takes = (_NAME,)
    request_type = AdapterRequest
    refresh_s = 1.0
    """Seconds between two looks at the registry."""
    fetch_s = 120.0
    """Seconds that a fetch of an adapter may take."""

    def __init__(self, pb_utils: PbUtils, args: ModelArgs) -> None:
        log = model_log(pb_utils, args.name)
        params = settings.read(AdapterCacheSettings, args.parameters)
        base = _load_base(args, params, log)
        self.runtime = runtime = cast(DecodeModel, base.runtime)
        self._text_blocks = blocks_of(runtime.max_length)
        on_gpu = args.kind == "GPU"
        kernels = _load_kernels(base, params, runtime, on_gpu, log)
        architecture = Architecture.read(base.folder)
        self.adapters = ServedAdapters(
            args,
            params,
            _base_model(args.parameters, base.folder, architecture, params),
            SharedMemory(runtime.memory, base.pool, runtime.block_elements, self._text_blocks),
            log,
            write=kernels.store,
            on_change=self._wake,
            on_failure=self._fail_waiting,
            fetch_s=self.fetch_s,
            open_host=partial(HOST_TIERS["cuda"], params.host_mb << 20) if on_gpu else None,
        )
        self.cache, self.catalogue = self.adapters.cache, self.adapters.catalogue
        cache = self.cache
        hook = (runtime.memory, cache.places_of, kernels, cache.has_magnitudes)
        if kernels.fits_graphs:
            runtime.linear_hook = LORA_HOOKS["cuda"](*hook, slots=runtime.slots, layers=architecture.layers)
        else:
            runtime.linear_hook = LoraHook(*hook)
        self._awaiting: set[GenerateJob] = set()
        weights = params.predictor_weights
        self.predictor: LengthPredictor = WordRegressor.load(args.folder / weights) if weights else RunningMean()
        log.info(f"{len(self.catalogue)} adapters, {kernels.name}, {params.adapter_mb} MiB held, {params.scheduler}")
        decode = base.settings
        inputs = SchedulerInputs(
            cache, decode.queue_requests, self._adapter_tokens, BLOCK_TOKENS, classes=decode.classes
        )
        super().__init__(pb_utils, args, base, SCHEDULERS[params.scheduler](inputs))
        self._watching = Loop("adapter-registry", self._watch_registry, log.error)
        self._watching.start()

    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> GenerateJob:
        job = super().parse(request, params, client)
        if not self.adapters.must_fetch(job.parameters.lora_name):
            self._use_adapter(job)
        return job

    def start(self, job: GenerateJob) -> None:
        self._count(job)
        super().start(job)

    def queue(self, job: GenerateJob) -> None:
        if job.parameters.lora_name is not None and _requests(job)[0].adapter is None:
            self._awaiting.add(job)
            self.adapters.first_use.fetch(job.parameters.lora_name, partial(self._fetched, job))
            return
        for request in _requests(job):
            prediction = _prediction_input(request, job.prompt_of(request).text)
            request.predicted_tokens = self.predictor.predict(prediction)
            self.submit(request)

    def end(self, job: GenerateJob, reason: Reason) -> None:
        self._fetched(job, reason)
        super().end(job, reason)

    def answered(self, job: GenerateJob) -> None:
        for request in _requests(job):
            if request.finish_reason in (STOP, LENGTH):
                self.predictor.learn(_prediction_input(request), request.generated)
        self._release(job)
        super().answered(job)

    def facts(self, job: GenerateJob) -> RequestLine:
        request = _requests(job)[0]
        if request.source is None:
            return super().facts(job)
        # One that got no slot had no adapter in memory.
        is_hit = request.admitted > 0 and request.source.load[1] <= request.arrived
        facts = {"adapter": request.label, "adapter_hit": is_hit}
        return {**super().facts(job), **facts, "predicted_tokens": request.predicted_tokens}

    def recorded(self, job: GenerateJob) -> Sequence[RequestLine]:
        rows = zip(super().recorded(job), _requests(job), strict=True)
        return [{**row, "lora_name": request.label} for row, request in rows]

    def ended(self, job: GenerateJob, line: RequestLine | None, trace: Trace | None, code: str) -> None:
        request = _requests(job)[0]
        if trace is not None and request.source is not None and request.source.load[1] > request.arrived:
            trace.span("adapter load", *request.source.load, {"adapter": request.label})
        super().ended(job, line, trace, code)

    def describe(self) -> Description:
        return replace(super().describe(), **self.adapters.describe())

    def metrics(self) -> Sequence[Metric]:
        return [
            *super().metrics(),
            *self.adapters.metrics(),
            requests_info(lambda: self.runtime.slots, lambda: _labels(cast(list[AdapterRequest], self.live))),
        ]

    def stop(self) -> None:
        self._watching.stop(5.0)
        self.adapters.close_fetches()
        # Before what it uses.
        self.loop.close()
        self.cache.close()
        super().stop()

    def named_adapter(self, request: InferenceRequest) -> str:
        """The value of `lora_name`, a parameter or in the input `sampling_parameters`; empty where there is none.

        What is invalid is left for the front that serves the request.
        """
        name = _name_in(request.parameters().encode())
        tensor = None if name else self.pb_utils.get_input_tensor_by_name(request, _SAMPLING)
        if tensor is not None:
            name = next(map(_name_in, tensor.as_numpy().reshape(-1)[:1].tolist()), "")
        return name

    def _use_adapter(self, job: GenerateJob) -> None:
        """Hold the adapter that the job names. Raises the errors of `Catalogue.hold`, and of what no slots hold."""
        name = job.parameters.lora_name
        try:
            for request in _requests(job):
                if name is not None:
                    request.use(self.catalogue.hold(name))
                self._require_memory(request)
        except Exception:
            self._release(job)
            for request in _requests(job):
                request.adapter = request.source = None
            raise

    def _count(self, job: GenerateJob) -> None:
        for request in _requests(job):
            if request.source is not None:
                self.adapters.count(request.source, request.arrived)

    def _fetched(self, job: GenerateJob, reason: Reason | None) -> None:
        """The adapter that the job waits for is there, or the job ends; the first call counts. Any thread."""
        try:
            self._awaiting.remove(job)
        except KeyError:
            return
        if reason is None:
            try:
                self._use_adapter(job)
                self._count(job)
                self.queue(job)
            except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
                reason = error
        if reason is not None:
            self.end_unqueued(job, reason)

    def _end_late(self) -> None:
        """End what has waited for an adapter beyond its deadline; the loop does so for what it has."""
        for job in list(self._awaiting):
            deadline = job.requests[0].deadline
            if deadline is not None and deadline < time.monotonic():
                self._fetched(job, OverloadedError(TOO_LATE))

    def _require_memory(self, request: AdapterRequest) -> None:
        # Its adapter may hold all blocks but those that are kept, and does so while it is in use.
        pool, held = self.loaded.pool, blocks_of(self._adapter_tokens(request.adapter))
        request.require_memory(pool.count, held if held <= pool.count - self._text_blocks else 0)

    def _release(self, job: GenerateJob) -> None:
        for request in _requests(job):
            if request.adapter is not None:
                self.cache.table.unhold(request.adapter)

    def _adapter_tokens(self, name: str | None) -> int:
        """The memory of an adapter in tokens of KV cache."""
        return -(-self.cache.elements(name) * BLOCK_TOKENS // self.runtime.block_elements)

    def _wake(self) -> None:
        self.loop.wake()

    def _fail_waiting(self, adapter: Adapter, reason: Exception) -> None:
        for request in cast(list[AdapterRequest], self.live):
            if request.adapter == adapter.name and request.slot is None:
                self.loop.end(request, reason)

    def _watch_registry(self) -> float:
        self._end_late()
        has_changed = self.catalogue.refresh()
        if self.adapters.prefetch() or has_changed:
            self._wake()
        return self.refresh_s


def _requests(job: GenerateJob) -> Sequence[AdapterRequest]:
    return cast(Sequence[AdapterRequest], job.requests)


def _prediction_input(request: AdapterRequest, text: bytes = b"") -> PredictionInput:
    return PredictionInput(request.adapter, request.prompt_tokens, request.limit, text=text)


def _name_in(text: bytes) -> str:
    if _NAME.encode() not in text:
        return ""
    try:
        name = json.loads(text).get(_NAME)
    except (ValueError, AttributeError):
        return ""
    return name if isinstance(name, str) else ""


def _labels(live: Iterable[AdapterRequest]) -> tuple[set[str], set[str]]:
    """Which adapters requests run with, and which they wait for."""
    named = [request for request in live if request.label]
    running = {request.label for request in named if request.slot is not None}
    return running, {request.label for request in named if request.slot is None and not request.is_finished}


def _load_base(args: ModelArgs, params: AdapterCacheSettings, log: Logger) -> Loaded:
    """The base model, with memory for adapters. Raises the errors of `shapeshift.errors`."""
    require_one_rank(settings.read(FusedDecodeSettings, args.parameters))
    open_runtime = partial(loading.load_runtime, extra_bytes=params.adapter_mb << 20)

    def load_runtime(folder: Path, decode: FusedDecodeSettings, *where: Any) -> Runtime:
        require_plain_layers(Architecture.read(folder))
        return open_runtime(folder, decode, *where)

    return loading.load(args, log, load_runtime, (AdapterCacheSettings,))


def _load_kernels(
    base: Loaded, params: AdapterCacheSettings, runtime: DecodeModel, on_gpu: bool, log: Logger
) -> LoraKernels:
    """Those of a GPU, where they prove right; the native ones on a CPU with a compiler; plain torch otherwise."""
    kernels: LoraKernels | None = None
    if on_gpu:
        kernels = LORA_KERNELS["grouped"](params.max_rank, runtime.memory, log.warning)
    elif base.settings.native:
        kernels = LORA_KERNELS["native"](base.kernel_cache, log.warning)
    return kernels or LORA_KERNELS["torch"]()


def _base_model(
    parameters: Mapping[str, str], folder: Path, architecture: Architecture, params: AdapterCacheSettings
) -> BaseModel:
    names = {folder.name, str(folder), *filter(None, params.base_names.split(","))}
    sha256 = settings.read(GeneratedDecodeSettings, parameters).checkpoint_sha256
    return BaseModel.of_decoder(architecture, names, params.max_rank, folder, sha256)
