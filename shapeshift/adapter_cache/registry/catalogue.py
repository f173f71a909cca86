"""The adapters that requests may name, from the registry and multi_lora.json, refreshed while they are served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shapeshift.adapter_cache.memory.adapter_table import Adapter, make_adapter, unavailable
from shapeshift.adapter_cache.memory.cache import MAX_LABELS, AdapterCache
from shapeshift.adapter_cache.memory.loader import Store, load_weights
from shapeshift.adapter_cache.memory.placement import SharedMemory
from shapeshift.adapter_cache.registry import peft, store
from shapeshift.adapter_cache.registry.peft import BaseModel
from shapeshift.adapter_cache.settings import EVICTION_RULES, FIRST_USE, PREFETCHERS, AdapterSettings
from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.registry import FILE, FolderWatch
from shapeshift.serving.description import registry_version
from shapeshift.serving.metrics import OTHER, Gauge, Info, Metric
from shapeshift.serving.model_args import Log, ModelArgs

_READ_ERRORS = (ShapeshiftError, SafetensorError, OSError)
"""What reading an adapter may raise."""
_MOST_FETCHED = 1000
"""Adapters from outside the registry, beyond which the one that was used longest ago is forgotten."""


class Catalogue:
    """The adapters by the name that requests use. One thread calls `refresh`, any thread the rest.

    A changed entry is checked completely, down to the weights, before requests may name it; the others are served
    meanwhile. A refused entry changes nothing: its name keeps its old adapter.
    """

    def __init__(
        self,
        folder: Path,
        fixed: Mapping[str, Path],
        base: BaseModel,
        cache: AdapterCache,
        element_bytes: int,
        log: Log,
    ) -> None:
        """folder: the registry; fixed: adapters of multi_lora.json; element_bytes: of the cache's memory."""
        self._folder = folder
        self._base = base
        self._cache = cache
        self._element_bytes = element_bytes
        self._log = log
        self._watch = FolderWatch(folder / FILE)
        self._refused: dict[str, store.Entry] = {}
        self._fetched: dict[str, Adapter] = {}
        self._lock = threading.Lock()
        self._fixed = self._read_fixed(fixed)
        self._adapters = dict(self._fixed)
        self.refresh(first=True)

    def __len__(self) -> int:
        return len(self._adapters)

    def all(self) -> list[Adapter]:
        """All adapters that requests may name."""
        return list(self._adapters.values())

    def has(self, name: str) -> bool:
        """Whether requests may name it."""
        return name in self._adapters

    def forget(self, adapter: Adapter) -> bool:
        """Refuse new requests for `adapter`, if it was fetched; whether it was."""
        with self._lock:
            if self._fetched.get(adapter.label) is not adapter:
                return False
            self._forget(adapter)
            return True

    def add_fetched(self, name: str, folder: Path, sha256: str) -> None:
        """Have requests name the adapter in `folder`, which is in no registry; `sha256` and the weights are checked by
        its first load. Raises the errors of `peft.read`."""
        adapter = self._make(name, sha256, peft.read(folder, self._base), verified=False)
        with self._lock:
            if name in self._adapters:
                return
            self._cache.table.add(adapter)
            self._fetched[name] = adapter
            self._adapters = {**self._adapters, name: adapter}
            if len(self._fetched) > _MOST_FETCHED:
                oldest = min((one for one in self._fetched.values() if one is not adapter), key=lambda one: one.last)
                self._forget(oldest)
        self._log(f"adapter {name} is from {folder}, {sha256[:12]}")

    def registered(self) -> dict[str, str]:
        """The hashes of the adapters that were not fetched, by name."""
        return {name: adapter.sha256 for name, adapter in self._adapters.items() if name not in self._fetched}

    def find(self, name: str) -> Adapter:
        """The current adapter of `name`. Raises NotFoundError, which lists some names."""
        adapter = self._adapters.get(name)
        if adapter is None:
            store.check_name(name, "parameter lora_name")
            raise store.unknown_adapter(name, list(self._adapters), "lora_name")
        return adapter

    def hold(self, name: str) -> Adapter:
        """The adapter of `name`, for a request; it stays in the cache's table until `unhold` there.

        Raises NotFoundError as `find`, and the error of `unavailable` for an adapter that cannot be loaded now.
        """
        # An adapter that has left the table is no longer found.
        while not self._cache.table.hold(adapter := self.find(name)):
            continue
        if (error := adapter.error) is not None:
            self._cache.table.unhold(adapter.name)
            raise unavailable(f"adapter {adapter.label} is unavailable", error)
        return adapter

    def refresh(self, first: bool = False) -> bool:
        """Apply a change of the registry; whether there was one. Never raises.

        first: leave the check of the weights to their first load.
        """
        if not self._watch.has_changed() and not first:
            return False
        try:
            entries = store.read(self._folder)
        except ShapeshiftError as error:
            self._refuse(f"the change of the registry is ignored: {error}")
            return False
        self._apply(entries, first)
        return True

    def _apply(self, entries: Mapping[str, store.Entry], first: bool) -> None:
        adapters = dict(self._fixed)
        for name, entry in entries.items():
            if name in self._fixed:
                self._refuse_once(name, entry, f"{store.MULTI_LORA} has an adapter of this name")
                continue
            old = self._adapters.get(name)
            if old is not None and old.sha256 == entry.sha256 and old.error is None and _is_unchanged(old):
                adapters[name] = old
                continue
            new = None if self._refused.get(name) == entry else self._read(name, entry, first)
            if (adapter := new or old) is not None:
                adapters[name] = adapter
        with self._lock:
            self._fetched = {name: adapter for name, adapter in self._fetched.items() if name not in adapters}
            adapters |= self._fetched
            for name, adapter in adapters.items():
                if self._adapters.get(name) is not adapter:
                    self._cache.table.add(adapter)
            replaced = [adapter for name, adapter in self._adapters.items() if adapters.get(name) is not adapter]
            self._adapters = adapters
        self._refused = {name: entry for name, entry in self._refused.items() if entries.get(name) == entry}
        registered = adapters.keys() - self._fixed.keys() - self._fetched.keys()
        self._pin([adapters[name] for name, entry in sorted(entries.items()) if entry.pinned and name in registered])
        # Last: an adapter that has left the table must be neither found nor pinned.
        for adapter in replaced:
            self._cache.table.withdraw(adapter)

    def _forget(self, adapter: Adapter) -> None:
        del self._fetched[adapter.label]
        self._adapters = {name: one for name, one in self._adapters.items() if one is not adapter}
        self._cache.table.withdraw(adapter)

    def _read(self, name: str, entry: store.Entry, first: bool) -> Adapter | None:
        try:
            folder = store.entry_folder(self._folder, entry)
            source = peft.read(folder, self._base, entry.base)
            # After `peft.read`: the stamp of `source` detects every later change.
            unchanged = entry.stamps == store.stamps(folder)
            if not first:
                if store.digest(folder) != entry.sha256:
                    raise InvalidInputError("sha256", entry.sha256, "the hash of the files; add the adapter again")
                peft.require_finite(source)
            return self._make(name, entry.sha256, source, verified=not first or unchanged)
        except _READ_ERRORS as error:
            self._refuse_once(name, entry, str(error))
            return None

    def _make(self, name: str, sha256: str, source: peft.PeftAdapter, verified: bool) -> Adapter:
        adapter = make_adapter(name, sha256, source, self._element_bytes)
        adapter.verified = verified
        if adapter.elements > self._cache.max_elements:
            limit = self._cache.max_elements * self._element_bytes >> 20
            raise InvalidInputError("adapter", name, f"{adapter.info.bytes} bytes do not fit into adapter_mb ({limit})")
        return adapter

    def _read_fixed(self, fixed: Mapping[str, Path]) -> dict[str, Adapter]:
        adapters = {}
        for name, folder in fixed.items():
            try:
                source = peft.read(folder, self._base)
                adapters[name] = self._make(name, store.digest(folder), source, verified=True)
                self._cache.table.add(adapters[name])
            except _READ_ERRORS as error:
                self._refuse(f"adapter {name} of {store.MULTI_LORA} is refused: {error}")
        return adapters

    def _pin(self, adapters: list[Adapter]) -> None:
        """Pin adapters as long as the reserve still holds any other one beside them."""
        largest = max((adapter.elements for adapter in self._adapters.values() if adapter not in adapters), default=0)
        left = self._cache.max_elements - largest
        pinned = []
        for adapter in adapters:
            if adapter.elements > left:
                self._refuse(f"adapter {adapter.label} is not pinned: adapter_mb leaves too little beside it")
                continue
            left -= adapter.elements
            pinned.append(adapter)
        self._cache.preload.pin(pinned)

    def _refuse_once(self, name: str, entry: store.Entry, reason: str) -> None:
        if self._refused.get(name) != entry:
            self._refused[name] = entry
            self._refuse(f"adapter {name} is refused: {reason}")

    def _refuse(self, text: str) -> None:
        self._cache.metrics.refused.add()
        self._log(text)


def _is_unchanged(adapter: Adapter) -> bool:
    """Whether its weights file is the one that was read; adding an adapter again changes the file's time."""
    return store.stamps(adapter.source.folder)[-1:] == (adapter.source.stamp,)


class ServedAdapters:
    """The adapters of one front: their memory, the registry, what is fetched on first use, and what requests will want.

    See `AdapterCache` and `Catalogue` for which thread may call what.

    first_use: what fetches adapters that are not registered; None: nothing does
    """

    def __init__(
        self,
        args: ModelArgs,
        params: AdapterSettings,
        base: BaseModel,
        memory: SharedMemory,
        log: Logger,
        *,
        write: Store,
        on_change: Callable[[], None],
        on_failure: Callable[[Adapter, Exception], None],
        fetch_s: float,
        open_host: Callable[..., Any] | None = None,
    ) -> None:
        """write: see `LoraKernels.store`; on_failure: gets what requests are answered that wait for the adapter;
        fetch_s: seconds that a fetch may take; the others: see `AdapterCache`."""
        self._log, self._on_failure = log, on_failure
        self.cache = AdapterCache(
            memory,
            rule=EVICTION_RULES[params.eviction],
            load=partial(load_weights, write=write),
            on_change=on_change,
            on_failure=self._failed,
            open_host=open_host,
        )
        folder, element_bytes = (args.folder / params.adapters_dir).resolve(), memory.buffer.element_size()
        multi_lora = store.read_multi_lora(args.folder / "1")
        self.catalogue = Catalogue(folder, multi_lora, base, self.cache, element_bytes, log.warning)
        self.first_use: Any = None
        if params.sources:
            most_bytes = (params.adapter_mb << 20) * 4 // element_bytes
            options = (params.sources, folder, most_bytes, self.catalogue.add_fetched, fetch_s)
            self.first_use = FIRST_USE["process"](*options)
        self.prefetcher = PREFETCHERS["gaps"]() if params.prefetch else None
        self._prefetching = threading.Lock()

    def must_fetch(self, name: str | None) -> bool:
        """Whether `name` is fetched before requests may use it. Raises InvalidInputError for an id outside of
        `adapter_sources`."""
        if self.first_use is None or name is None or self.catalogue.has(name):
            return False
        return bool(self.first_use.allows(name))

    def count(self, adapter: Adapter, arrived: float) -> None:
        """One more request uses `adapter`, which arrived at monotonic seconds."""
        self.cache.metrics.requests.add(adapter.label)
        if self.prefetcher is not None:
            with self._prefetching:
                self.prefetcher.record(adapter.name, arrived)

    def prefetch(self) -> bool:
        """Pass the adapters for which requests are predicted to the cache; whether there are any."""
        prefetcher, cache = self.prefetcher, self.cache
        if prefetcher is None:
            return False
        infos = [adapter.info for adapter in self.catalogue.all()]
        with self._prefetching:
            names = prefetcher.plan(infos, cache.resident_names(), cache.free_reserve_bytes(), time.monotonic())
        for name in names:
            cache.preload.prefetch(name)
        return bool(names)

    def describe(self) -> dict[str, Any]:
        """Their fields of `Description`."""
        names = sorted(adapter.label for adapter in self.catalogue.all())
        return {"adapters": names, "registry": registry_version(self.catalogue.registered())}

    def metrics(self) -> Sequence[Metric]:
        """Of the cache and of the registry."""
        cache = self.cache
        return [
            *cache.exported,
            Gauge("adapters_known", "Adapters that requests may name", lambda: len(self.catalogue)),
            Gauge("adapters_resident", "Adapters in memory, ready or loading", lambda: len(cache.resident_names())),
            Gauge("adapter_vacant_bytes", "Free bytes of the memory reserved for adapters", cache.free_reserve_bytes),
        ]

    def close_fetches(self) -> None:
        """End what is being fetched."""
        if self.first_use is not None:
            self.first_use.close()

    def _failed(self, adapter: Adapter, error: Exception) -> None:
        reason = unavailable(f"adapter {adapter.label} could not be loaded", error)
        self._log.error(str(reason))
        if self.catalogue.forget(adapter):
            self.first_use.refuse(adapter.label, reason)
        self._on_failure(adapter, reason)


def requests_info(most: Callable[[], int], labels: Callable[[], tuple[set[str], set[str]]]) -> Info:
    """A gauge of the model server protocol of the Gateway API's inference extension.

    most: adapters at once; labels: those that requests run with, and those that they wait for.
    """
    return Info(
        "lora_requests_info",
        "Running and waiting adapters, as labels; the value is the time in seconds",
        lambda: _info_labels(most(), *labels()),
    )


def _info_labels(most: int, running: set[str], waiting: set[str]) -> dict[str, str]:
    return {
        "max_lora": str(most),
        "running_lora_adapters": _joined(sorted(running)),
        "waiting_lora_adapters": _joined(sorted(waiting)),
    }


def _joined(names: Sequence[str]) -> str:
    return ",".join([*names[:MAX_LABELS], *([OTHER] if len(names) > MAX_LABELS else [])])
