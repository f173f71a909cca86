"""The front of a text model, an encoder or a classifier, whose requests may name LoRA adapters."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shapeshift import settings
from shapeshift.adapter_cache.lora.batch import ALIGNMENT
from shapeshift.adapter_cache.lora.segmented import TorchLora
from shapeshift.adapter_cache.memory.placement import SharedMemory
from shapeshift.adapter_cache.registry.catalogue import ServedAdapters, requests_info
from shapeshift.adapter_cache.settings import AdapterSettings
from shapeshift.adapter_cache.text.base import PackAdapters, base_model
from shapeshift.adapter_cache.text.waiting import WaitingTexts
from shapeshift.engines.execution.engine_set import MAX_ROWS
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.manifest import GeneratedSettings, Manifest
from shapeshift.engines.native import encoder
from shapeshift.engines.settings import TextEngineSettings
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.loops import Loop
from shapeshift.polymorph.front import TextFront, TextJob
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.serving.description import Description
from shapeshift.serving.front import Client, RequestLine
from shapeshift.serving.metrics import Metric
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest

_DEADLINE_CHECK_S = 0.05


class LoraTextFront(TextFront):
    """Computes texts with adapters in a cache; see `LoraFront`.

    A job holds its adapter from `parse` to `answered`; its texts wait for engines once the adapter is in memory.
    """

    takes = (*TextFront.takes, "lora_name")
    parameters = TextFront.parameters | settings.names(AdapterSettings)
    refresh_s = 1.0
    """Seconds between two looks at the registry."""
    fetch_s = 120.0
    """Seconds that a fetch of an adapter may take."""

    def open_executor(self, engines: Manifest, folder: Path, polymorph: PolymorphSettings) -> EngineExecutor:
        values = self.args.parameters
        params = settings.read(AdapterSettings, values)
        provider, placement = engines.provider, polymorph.placement
        settings.require(provider == "native", "provider", provider, "native, which alone serves adapters (adapter_mb)")
        settings.require(placement == "inline", "placement", placement, "inline with adapters (adapter_mb)")
        checkpoint = (self.args.folder / settings.read(TextEngineSettings, values).checkpoint).resolve()
        names = {checkpoint.name, str(checkpoint), *filter(None, params.base_names.split(","))}
        sha256 = settings.read(GeneratedSettings, values).checkpoint_sha256
        base = base_model(folder, names, params.max_rank, checkpoint, sha256)
        dtype = encoder.value_type(folder)
        memory = torch.zeros((params.adapter_mb << 20) // dtype.itemsize, dtype=dtype)
        executor = EngineExecutor(engines, folder, polymorph, self.log.warning, adapted=PackAdapters(memory, base.head))
        self._jobs = threading.Lock()
        self._waiting = WaitingTexts(executor.submit, polymorph.queue_rows)
        self.adapters = ServedAdapters(
            self.args,
            params,
            base,
            # There are no texts beside the adapters.
            SharedMemory(memory, BlockPool(0), ALIGNMENT, 0, is_shared=True),
            self.log,
            write=TorchLora().store,
            on_change=self._waiting.advance,
            on_failure=self._waiting.fail,
            fetch_s=self.fetch_s,
        )
        self._waiting.cache = self.adapters.cache
        # Pinned adapters.
        self._waiting.advance()
        self._refresh_at = 0.0
        self._watching = Loop("adapter-registry", self._watch, self.log.error)
        self._watching.start()
        self.log.info(f"{len(self.adapters.catalogue)} adapters, {params.adapter_mb} MiB held")
        return executor

    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> TextJob:
        must_fetch = self.adapters.must_fetch(params.lora_name)
        if params.lora_name is not None and not must_fetch:
            # Before the texts are read.
            self.adapters.catalogue.find(params.lora_name)
        job = super().parse(request, params, client)
        if not must_fetch:
            self._hold(job)
        return job

    def start(self, job: TextJob) -> None:
        if job.lora_name is None:
            self.executor.submit(job)
        elif job.adapter is None:
            self.adapters.first_use.fetch(job.lora_name, partial(self._fetched, job))
        else:
            try:
                self._wait(job)
            except BaseException:
                self._release(job)
                raise

    def answered(self, job: TextJob) -> None:
        self._release(job)
        super().answered(job)

    def facts(self, job: TextJob) -> RequestLine:
        if job.adapter is None:
            return super().facts(job)
        is_hit = job.adapter.load[1] <= job.arrived
        return {**super().facts(job), "adapter": job.adapter.label, "adapter_hit": is_hit}

    def recorded(self, job: TextJob) -> Sequence[RequestLine]:
        return [{**row, "lora_name": job.lora_name or ""} for row in super().recorded(job)]

    def describe(self) -> Description:
        return replace(super().describe(), **self.adapters.describe())

    @property
    def waiting(self) -> int:
        return super().waiting + len(self._waiting)

    def metrics(self) -> Sequence[Metric]:
        most = MAX_ROWS * len(self.executor.steps)
        info = requests_info(lambda: most, lambda: self._waiting.labels)
        return [*super().metrics(), *self.adapters.metrics(), info]

    def stop(self) -> None:
        self._watching.stop(5.0)
        self.adapters.close_fetches()
        self._waiting.close()
        super().stop()
        self.adapters.cache.close()

    def _hold(self, job: TextJob) -> None:
        """Raises the errors of `Catalogue.hold`."""
        if job.lora_name is not None:
            job.adapter, job.holds = self.adapters.catalogue.hold(job.lora_name), True

    def _wait(self, job: TextJob) -> None:
        self.adapters.count(job.adapter, job.arrived)
        self._waiting.add(job)

    def _release(self, job: TextJob) -> None:
        """Of two calls the first one counts."""
        with self._jobs:
            holds, job.holds = job.holds, False
        if holds:
            self._waiting.release(job)
            self.adapters.cache.table.unhold(job.adapter.name)

    def _fetched(self, job: TextJob, error: Exception | None) -> None:
        """The adapter that the job waits for is there, or not. On the thread of the fetch."""
        if error is None and not job.finished:
            try:
                self._hold(job)
                self._wait(job)
            except Exception as raised:  # noqa: BLE001  whatever it is, it is the answer
                error = raised
        if error is not None:
            job.fail(error)
        if job.finished:
            self._release(job)

    def _watch(self) -> float:
        self._waiting.fail_late()
        if time.monotonic() >= self._refresh_at:
            self._refresh_at = time.monotonic() + self.refresh_s
            has_changed = self.adapters.catalogue.refresh()
            if self.adapters.prefetch() or has_changed:
                self._waiting.advance()
        return _DEADLINE_CHECK_S
