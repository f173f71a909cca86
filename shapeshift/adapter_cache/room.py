"""What a front that generates is made of where requests name adapters."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.adapter_cache import loader, multi_lora, native, prefetch, scheduling
from shapeshift.adapter_cache.cache import AdapterCache
from shapeshift.adapter_cache.catalogue import Catalogue
from shapeshift.adapter_cache.embed import Embedder
from shapeshift.adapter_cache.gate import Gate
from shapeshift.adapter_cache.peft import Base
from shapeshift.adapter_cache.predict import Asked, Predictor, Regressor, RunningMean
from shapeshift.adapter_cache.record import Adapter
from shapeshift.adapter_cache.report import LoopReport
from shapeshift.adapter_cache.scheduling import SchedulingSettings
from shapeshift.adapter_cache.segmented import Segmented
from shapeshift.adapter_cache.sequence import AdapterSequence
from shapeshift.adapter_cache.settings import AdapterCacheSettings
from shapeshift.adapter_cache.stacked import Stacked
from shapeshift.adapter_cache.terms import Terms
from shapeshift.errors import EngineError
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.admission import Admission
from shapeshift.fused_decode.architecture import Architecture
from shapeshift.fused_decode.loop import DecodeLoop
from shapeshift.fused_decode.model import DecodeModel
from shapeshift.fused_decode.room import OWN_PARAMETERS, Room
from shapeshift.fused_decode.sequence import LENGTH, STOP, Sequence
from shapeshift.serving.log import Log
from shapeshift.serving.metrics import Metric
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.parameters import RequestParameters

_PERIOD_S = 1.0
_HORIZON_S = 5.0


class AdapterRoom(Room):
    """See `fused_decode.room.Room`: adapters in a cache, a scheduler that knows of them, a registry that is watched."""

    own_parameters = (*OWN_PARAMETERS, "lora_name")
    # Where vLLM's backend has it.
    sampling_parameters = ("lora_name",)

    def __init__(self, pb_utils: Any, args: ModelArgs, log: Log) -> None:
        self._own = own = settings.read(AdapterCacheSettings, args.parameters)
        self._order = settings.read(SchedulingSettings, args.parameters)
        load = partial(loading.load_runtime, beside=own.adapter_mb << 20)
        self.loaded = loading.load(args, log, load, (AdapterCacheSettings, SchedulingSettings))
        runtime = self.loaded.runtime
        assert isinstance(runtime, DecodeModel)
        self._log = log
        self._runtime = runtime
        self._lock = threading.Lock()
        self._live: dict[str, set[AdapterSequence]] = {}
        self._predictor: Predictor = RunningMean()
        self._embed: Embedder | None = None
        if own.predictor_weights:
            self._predictor = Regressor.load(Path(own.predictor_weights))
            self._embed = Embedder(pb_utils, own.predictor_model, log)
        self._histograms = prefetch.Histograms()
        self._loop: DecodeLoop | None = None
        self._gate: Gate[Any] | None = None
        kernels = native.load(self.loaded.kernels, log) if self.loaded.own.native and args.kind != "GPU" else None
        self.ground = self.cache = AdapterCache(
            runtime.memory,
            runtime.slots,
            runtime.slot_elements,
            runtime.max_length,
            algorithm=own.eviction,
            keeps=own.caching,
            write=kernels.store if kernels else loader.store,
            woken=self._wake,
            failed=self._cannot_load,
        )
        form = kernels or Segmented()
        runtime.adjuster = Terms(runtime.memory, self.cache.find, form, Stacked(), own.stacked_ranks)
        folder = (args.folder / own.adapters_dir).resolve()
        names = {self.loaded.folder.name, str(self.loaded.folder), *filter(None, own.base_names.split(","))}
        self.catalogue = Catalogue(
            folder,
            multi_lora.read(args.folder / "1"),
            Base(Architecture.read(self.loaded.folder), names, own.max_rank),
            self.cache,
            runtime.memory.element_size(),
            log,
        )
        log(
            f"{len(self.catalogue)} adapters, {form.name}, {own.adapter_mb} MiB for them alone, {self._order.scheduler}"
        )
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._run, name="registry", daemon=True)

    def admission(self) -> Admission[Sequence]:
        own = self.loaded.own
        self._gate = scheduling.build(
            self._order,
            self.cache,
            own.queue_requests,
            own.queue_tokens,
            self._adapter_tokens,
            slot_tokens=self._runtime.max_length,
        )
        return self._gate

    def sequence(self, given: RequestParameters, text: bytes, *arguments: Any, **named: Any) -> AdapterSequence:
        chosen = None if given.lora_name is None else self.catalogue.find(given.lora_name)
        if chosen is not None and chosen.error is not None:
            raise EngineError(f"adapter {chosen.label} cannot be served: {chosen.error}")
        made = AdapterSequence(chosen, *arguments, **named)
        embedding = None if self._embed is None else self._embed(text)
        made.predicted_tokens = self._predictor.predict(replace(_asked(made), embedding=embedding))
        with self._lock:
            self._live.setdefault(made.adapter or "", set()).add(made)
            if chosen is not None:
                self.cache.meters.requests.add(chosen.label)
                self._histograms.arrived(chosen.name, made.arrived)
        return made

    def forget(self, sequence: Sequence) -> None:
        assert isinstance(sequence, AdapterSequence)
        if sequence.finish in (STOP, LENGTH):
            self._predictor.learn(_asked(sequence), sequence.generated)
        with self._lock:
            named = self._live.get(sequence.adapter or "", set())
            named.discard(sequence)
            if not named:
                self._live.pop(sequence.adapter or "", None)

    def exported(self) -> list[Metric]:
        assert self._gate is not None
        report = LoopReport(self.cache, self._gate, self._running_and_waiting, self._runtime.slots, self.catalogue)
        return [*self.cache.meters.exported, *report.exported]

    def open(self, loop: DecodeLoop) -> None:
        self._loop = loop
        self._watch.start()
        loop.wake()

    def close(self) -> None:
        self._stop.set()
        self._watch.join(5.0)
        self.cache.close()

    def _adapter_tokens(self, name: str | None) -> int:
        """The memory of an adapter in tokens of cache."""
        tokens = self._runtime.slot_elements // self._runtime.max_length
        return -(-self.cache.elements(name) // tokens)

    def _running_and_waiting(self) -> tuple[list[str], list[str]]:
        """Labels of the adapters that requests run with, and that others wait for."""
        with self._lock:
            live = [sequence for named in self._live.values() for sequence in named if sequence.label]
        running = {sequence.label for sequence in live if sequence.slot is not None}
        waiting = {sequence.label for sequence in live if sequence.slot is None and not sequence.ended}
        return sorted(running), sorted(waiting)

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def _cannot_load(self, adapter: Adapter, error: Exception) -> None:
        self._log(f"adapter {adapter.label} could not be loaded: {error}")
        with self._lock:
            waiting = [one for one in self._live.get(adapter.name, ()) if one.slot is None]
        for sequence in waiting:
            if self._loop is not None:
                self._loop.end(sequence, EngineError(f"adapter {adapter.label} could not be loaded: {error}"))

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            try:
                changed = self.catalogue.look()
                if self._own.prefetch:
                    changed = self._guess() or changed
            except Exception as error:  # noqa: BLE001  what goes wrong once must not end the watch
                self._log(f"the adapters could not be looked at: {type(error).__name__}: {error}")
                continue
            if changed:
                self._wake()

    def _guess(self) -> bool:
        """Name to the cache what may be asked for soon; whether there is something."""
        infos = [one.info for one in self.catalogue.all()]
        with self._lock:
            chosen = prefetch.plan(
                self._histograms, infos, self.cache.residents(), self.cache.vacant_bytes, time.monotonic(), _HORIZON_S
            )
        for name in chosen:
            self.cache.ahead.guess(name)
        return bool(chosen)


def _asked(sequence: AdapterSequence) -> Asked:
    return Asked(sequence.adapter, sequence.prompt_tokens, sequence.max_new_tokens)
