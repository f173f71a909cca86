"""The front of a model that generates, whose requests may name LoRA adapters."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from shapeshift.adapter_cache import loading
from shapeshift.adapter_cache.interfaces import PredictionInput
from shapeshift.adapter_cache.memory.adapter_table import Adapter, unavailable
from shapeshift.adapter_cache.metrics import scheduler_metrics, state_metrics
from shapeshift.fused_decode.engine.slots import require_memory
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.interfaces import blocks_of
from shapeshift.fused_decode.job import GenerateJob
from shapeshift.fused_decode.request import LENGTH, STOP, Request
from shapeshift.serving.description import Description, registry_version
from shapeshift.serving.front import Client
from shapeshift.serving.metrics import Metric
from shapeshift.serving.model_args import ModelArgs, model_log
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, PbUtils

_REFRESH_S = 1.0
_NAME, _SAMPLING = "lora_name", "sampling_parameters"


class AdapterRequest(Request):
    """A request that may name an adapter, see `interfaces.SizedRequest`; `LoraFront` sets what it adds.

    adapter, label, rank: the adapter's unique name, the name that clients use, and its rank; None, "", 0 without one.
    """

    __slots__ = ("adapter", "label", "predicted_tokens", "rank")

    def __init__(self, *fields: Any, **named: Any) -> None:
        super().__init__(*fields, **named)
        self.predicted_tokens = 0
        self.use(None)

    def use(self, adapter: Adapter | None) -> None:
        """Generate with `adapter`, or with the base model."""
        self.adapter: str | None = None if adapter is None else adapter.name
        self.label = "" if adapter is None else adapter.label
        self.rank = 0 if adapter is None else adapter.info.rank
        if adapter is not None:
            self.adapter_id = adapter.number

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def max_new_tokens(self) -> int:
        return self.limit


class LoraFront(GenerateFront):
    """Generates with adapters in a cache, a scheduler that knows them, and a registry that is watched.

    A job holds its adapter from `parse` to `answered`; the lengths of its answers are predicted before it is queued.
    """

    takes = (*GenerateFront.takes, _NAME)
    # As in vLLM's backend.
    sampling_takes = (_NAME,)
    request_type = AdapterRequest

    def __init__(self, pb_utils: PbUtils, args: ModelArgs) -> None:
        log = model_log(pb_utils, args.name)
        base = loading.load_base(args, log)
        self.adapters = loading.load(pb_utils, args, base, log, self._wake, self._fail_waiting)
        self._prefetching = threading.Lock()
        super().__init__(pb_utils, args, base, self.adapters.scheduler)
        self._stopping = threading.Event()
        self._watching = threading.Thread(target=self._watch_registry, name="registry", daemon=True)
        self._watching.start()

    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> GenerateJob:
        job = super().parse(request, params, client)
        name = job.parameters.lora_name
        try:
            for one in _requests(job):
                one.use(None if name is None else self.adapters.catalogue.hold(name))
                self._require_memory(one)
        except Exception:
            self._release(job)
            raise
        return job

    def start(self, job: GenerateJob) -> None:
        for request in _requests(job):
            if request.adapter is not None:
                self.adapters.cache.metrics.requests.add(request.label)
                if self.adapters.prefetcher is not None:
                    with self._prefetching:
                        self.adapters.prefetcher.record(request.adapter, request.arrived)
        super().start(job)

    def queue(self, job: GenerateJob) -> None:
        for request in _requests(job):
            prediction = _prediction_input(request, job.prompt_of(request).text)
            self.adapters.predictor.predict_later(prediction, partial(self._predicted, request))

    def answered(self, job: GenerateJob) -> None:
        for request in _requests(job):
            if request.finish_reason in (STOP, LENGTH):
                self.adapters.predictor.learn(_prediction_input(request), request.generated)
        self._release(job)
        super().answered(job)

    def describe(self) -> Description:
        hashes = {adapter.label: adapter.sha256 for adapter in self.adapters.catalogue.all()}
        return replace(super().describe(), adapters=sorted(hashes), registry=registry_version(hashes))

    def metrics(self) -> Sequence[Metric]:
        cache, catalogue = self.adapters.cache, self.adapters.catalogue
        return [
            *super().metrics(),
            *cache.metrics.exported,
            *state_metrics(
                self._running_and_waiting,
                self.adapters.runtime.slots,
                registered=lambda: len(catalogue),
                resident=lambda: len(cache.resident_names()),
                vacant_bytes=lambda: cache.free_reserve_bytes,
            ),
            *scheduler_metrics(self.adapters.scheduler),
            *self.adapters.follower.metrics,
        ]

    def stop(self) -> None:
        self.adapters.follower.close()
        self._stopping.set()
        self._watching.join(5.0)
        # Before what it uses.
        self.loop.close()
        self.adapters.predictor.close()
        self.adapters.cache.close()
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

    def _require_memory(self, request: AdapterRequest) -> None:
        # Its adapter may hold all blocks but those that are kept, and does so while it is in use.
        pool, held = self.loaded.pool, blocks_of(self.adapters.tokens(request.adapter))
        require_memory(request, pool.count, held if held <= pool.count - self.adapters.text_blocks else 0)

    def _release(self, job: GenerateJob) -> None:
        for request in _requests(job):
            if request.adapter is not None:
                self.adapters.cache.table.unhold(request.adapter)

    def _predicted(self, request: AdapterRequest, tokens: int) -> None:
        """Any thread calls this."""
        request.predicted_tokens = tokens
        self.submit(request)

    def _running_and_waiting(self) -> tuple[list[str], list[str]]:
        """Labels of the adapters that requests run with, and that requests wait for."""
        live = [request for request in cast(list[AdapterRequest], self.live) if request.label]
        running = {request.label for request in live if request.slot is not None}
        waiting = {request.label for request in live if request.slot is None and not request.is_finished}
        return sorted(running), sorted(waiting)

    def _wake(self) -> None:
        self.loop.wake()

    def _fail_waiting(self, adapter: Adapter, error: Exception) -> None:
        reason = unavailable(f"adapter {adapter.label} could not be loaded", error)
        self.log(str(reason))
        for request in cast(list[AdapterRequest], self.live):
            if request.adapter == adapter.name and request.slot is None:
                self.loop.end(request, reason)

    def _watch_registry(self) -> None:
        while not self._stopping.wait(_REFRESH_S):
            try:
                has_changed = self.adapters.catalogue.refresh()
                has_changed = self._prefetch() or has_changed
            except Exception as error:  # noqa: BLE001  one failure must not end the thread
                self.log(f"the check for changed adapters failed: {type(error).__name__}: {error}")
                continue
            if has_changed:
                self._wake()

    def _prefetch(self) -> bool:
        """Pass the adapters for which requests are predicted to the cache; whether there are any."""
        prefetcher, cache = self.adapters.prefetcher, self.adapters.cache
        if prefetcher is None:
            return False
        infos = [adapter.info for adapter in self.adapters.catalogue.all()]
        with self._prefetching:
            names = prefetcher.plan(infos, cache.resident_names(), cache.free_reserve_bytes, time.monotonic())
        for name in names:
            cache.preload.prefetch(name)
        return bool(names)


def _requests(job: GenerateJob) -> Sequence[AdapterRequest]:
    return cast(Sequence[AdapterRequest], job.requests)


def _prediction_input(request: AdapterRequest, text: bytes = b"") -> PredictionInput:
    return PredictionInput(request.adapter, request.prompt_tokens, request.max_new_tokens, text=text)


def _name_in(text: bytes) -> str:
    if _NAME.encode() not in text:
        return ""
    try:
        name = json.loads(text).get(_NAME)
    except (ValueError, AttributeError):
        return ""
    return name if isinstance(name, str) else ""
