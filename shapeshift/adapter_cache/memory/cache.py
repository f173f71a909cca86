"""The cache of adapters in the memory that they share with the slots (Chameleon, section 4.1)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.adapter_cache.interfaces import EvictionRule
from shapeshift.adapter_cache.memory.adapter_table import ABSENT, LOADING, READY, Adapter, AdapterTable
from shapeshift.adapter_cache.memory.loader import Loader, Store
from shapeshift.adapter_cache.memory.placement import Placement, Regions
from shapeshift.adapter_cache.metrics import FOR_SLOT, REMOVED, CacheMetrics

_MAX_PRELOADS = 2
"""Loads in flight beyond which nothing is preloaded."""
_REQUEST_SLOTS = 2
"""Slots that preloads leave to requests."""

OnFailure = Callable[[Adapter, Exception], None]


class StartLoad(Protocol):
    """See `AdapterCache._start_load`."""

    def __call__(
        self, adapter: Adapter, *, reserved_slots: int, on_demand: bool, evict: bool, spare_waiting: bool
    ) -> bool: ...


class Preloader:
    """Loads adapters before a request is admitted: pinned ones, those that requests wait for, and predicted ones.

    Any thread may call `pin` and `prefetch`; the generating thread calls `run`.
    """

    def __init__(self, table: AdapterTable, start_load: StartLoad) -> None:
        self._table = table
        self._start_load = start_load
        self._pinned: tuple[Adapter, ...] = ()
        self._predicted: deque[str] = deque()

    def pin(self, adapters: Iterable[Adapter]) -> None:
        """Load these adapters now and keep them; unpin all others."""
        pinned = tuple(adapters)
        for adapter in [*self._pinned, *pinned]:
            adapter.pinned = adapter in pinned
        self._pinned = pinned

    def prefetch(self, name: str) -> None:
        """Load `name`, for which a request is predicted, if nothing has to be evicted for it."""
        self._predicted.append(name)

    def run(self, in_flight: int) -> None:
        """Start loads beside the `in_flight` ones, as far as there is space."""
        left = _MAX_PRELOADS - in_flight
        for adapters, on_demand in ((self._pinned, False), (self._table.waiting_adapters(), True)):
            for adapter in filter(_is_loadable, adapters):
                if left <= 0 or not self._start_load(
                    adapter, reserved_slots=_REQUEST_SLOTS, on_demand=on_demand, evict=True, spare_waiting=True
                ):
                    return
                left -= 1
        while self._predicted and left > 0:
            predicted = self._table.by_name.get(self._predicted.popleft())
            if predicted is not None and _is_loadable(predicted):
                left -= self._start_load(
                    predicted, reserved_slots=_REQUEST_SLOTS, on_demand=False, evict=False, spare_waiting=True
                )


def _is_loadable(adapter: Adapter) -> bool:
    return adapter.state == ABSENT and adapter.error is None


class AdapterCache:
    """See `interfaces.AdapterMemory` and `fused_decode.interfaces.SlotMemory`.

    Adapters are in a reserve behind the slots and in slots without a request. An adapter that is in use or loading
    blocks its slot; any other one is evicted when a request gets the slot. Only the generating thread changes places,
    so nothing moves during an iteration; the loader's thread only fills the memory that it is given.

    table         all adapters
    preload       loads before admission
    on_change()   called on the loader's thread when waiting requests may be admissible
    on_failure(adapter, error)  called on the generating thread when a load fails for longer
    caching       False evicts every adapter that no request uses or waits for
    """

    def __init__(
        self,
        memory: torch.Tensor,
        slots: int,
        slot_elements: int,
        slot_tokens: int,
        *,
        rule: EvictionRule,
        caching: bool = True,
        write: Store,
        on_change: Callable[[], None],
        on_failure: OnFailure,
    ) -> None:
        self.metrics = CacheMetrics()
        self.table = AdapterTable()
        self.preload = Preloader(self.table, self._start_load)
        self._regions = Regions(slots, slot_elements, memory.numel())
        self._placement = Placement(memory, self._regions, self.table, rule, self.metrics)
        self._slots, self._slot_tokens = slots, slot_tokens
        self._on_change, self._on_failure = on_change, on_failure
        self._caching = caching
        self._held_slots = np.zeros(slots, bool)
        self._loader = Loader(self._on_loaded, write, lambda: bool(self._held_slots.any()))
        self._acquired = 0
        """Requests that have acquired since the iteration began, and get their slots next."""
        self._in_flight = 0
        self._ended_loads: deque[tuple[Adapter, Exception | None]] = deque()

    # Any thread.

    @property
    def max_elements(self) -> int:
        """Elements of the largest adapter that fits."""
        return self._regions.size(self._regions.reserve)

    @property
    def free_reserve_bytes(self) -> int:
        """Bytes of the reserve that no adapter has."""
        return self._regions.free(self._regions.reserve) * self._placement.element_bytes

    def elements(self, name: str | None) -> int:
        """Elements that an adapter takes; 0 for None."""
        return 0 if name is None else self.table[name].elements

    def queued(self, adapter: str | None) -> None:
        if adapter is not None:
            self.table.queued(adapter)

    def unqueued(self, adapter: str | None) -> None:
        if adapter is not None:
            self.table.unqueued(adapter)

    def resident_names(self) -> list[str]:
        """Names of the adapters that are ready or loading."""
        return list(self._regions)

    def close(self) -> None:
        """Finish the current load and end the loader's thread."""
        self._loader.close()

    # `AdapterMemory`, on the generating thread.

    @property
    def free_slots(self) -> int:
        """Slots that requests can get now."""
        return int((self.available() & ~self._held_slots).sum())

    @property
    def free_tokens(self) -> int:
        return self.free_slots * self._slot_tokens

    @property
    def total_tokens(self) -> int:
        return self._slots * self._slot_tokens

    def resident(self, adapter: str | None) -> bool:
        return adapter is None or self.table[adapter].state == READY

    def acquire(self, adapter: str | None, tokens: int = 0) -> bool:
        used = None if adapter is None else self.table[adapter]
        if used is not None and used.state != READY:
            return False
        blocks_slot = (
            used is not None and used.is_idle and self._regions.span(used.name).region != self._regions.reserve
        )
        left = self.free_slots - blocks_slot
        if left * self._slot_tokens < tokens or (used is not None and left <= self._acquired):
            return False
        if used is not None:
            self._use(used)
        self._acquired += 1
        return True

    def release(self, adapter: str | None) -> None:
        if adapter is not None:
            self.table[adapter].users -= 1

    def start_load(self, adapter: str, reserved_tokens: int = 0) -> bool:
        wanted = self.table[adapter]
        if wanted.error is not None:
            return False
        reserved_slots = max(-(-reserved_tokens // self._slot_tokens), self._acquired)
        return wanted.state != ABSENT or self._start_load(
            wanted, reserved_slots=reserved_slots, on_demand=True, evict=True, spare_waiting=False
        )

    # `SlotMemory` and the LoRA hook, on the generating thread.

    def places_of(self, numbers: list[int]) -> tuple[list[torch.Tensor], int]:
        """The places of adapters in use, by number, and a version that changes when one of them moves."""
        found = [self.table.numbered(number).places for number in numbers]
        return [places for places in found if places is not None], self._placement.version

    def has_magnitudes(self, number: int) -> bool:
        """Whether the adapter in use with this number is a DoRA."""
        return self.table.numbered(number).source.has_magnitudes

    def begin_iteration(self) -> None:
        self._acquired = 0
        while self._ended_loads:
            self._end_load(*self._ended_loads.popleft())
        for adapter in self.table.pop_unused():
            if adapter.state == READY:
                self._placement.evict(adapter, REMOVED)
        if not self._caching:
            self._evict_unused()
        for adapter in self.table.waiting_adapters():
            if (error := adapter.error) is not None:
                # A request that arrived while the load failed.
                self._on_failure(adapter, error)
        self.preload.run(self._in_flight)

    def available(self) -> npt.NDArray[np.bool_]:
        is_open = np.ones(self._slots, bool)
        for name in self._regions:
            region = self._regions.span(name).region
            if region != self._regions.reserve and not self.table[name].is_idle:
                is_open[region] = False
        return is_open

    def claim(self, slot: int) -> None:
        for name in self._regions.names_in(slot):
            self._placement.evict(self.table[name], FOR_SLOT)
        self._held_slots[slot] = True

    def vacate(self, slot: int) -> None:
        self._held_slots[slot] = False

    def check_integrity(self) -> None:
        """Raise AssertionError if places, states and counts contradict each other."""
        self._placement.check_integrity()
        for name in self._regions:
            region = self._regions.span(name).region
            is_held = region != self._regions.reserve and self._held_slots[region]
            assert not is_held, f"{name} is in a slot that a request holds"
        for adapter in self.table.all():
            assert adapter.users >= 0, f"{adapter.name} has {adapter.users} users"
            assert adapter.state == READY or not adapter.users, f"{adapter.name} is in use but not ready"
        loading = sum(adapter.state == LOADING for adapter in self.table.all())
        assert self._in_flight >= loading, "a load is lost"

    # Private, on the generating thread.

    def _use(self, adapter: Adapter) -> None:
        (self.metrics.misses if adapter.on_demand else self.metrics.hits).add()
        adapter.users += 1
        adapter.uses += 1
        adapter.on_demand = False
        adapter.last, adapter.base = time.monotonic(), self._placement.clock

    def _start_load(
        self, adapter: Adapter, *, reserved_slots: int, on_demand: bool, evict: bool, spare_waiting: bool
    ) -> bool:
        """Find space for `adapter` and start to load it; False if there is none.

        A slot is used only if more than `reserved_slots` are free. evict: whether idle adapters may be evicted;
        spare_waiting: except those that requests wait for.
        """
        slots = self._usable_slots(reserved_slots)
        span = self._placement.find(adapter, slots)
        if span is None and evict:
            span = self._placement.evict_for(adapter, slots, spare_waiting)
        if span is None:
            return False
        adapter.state, adapter.on_demand = LOADING, on_demand
        self._in_flight += 1
        self._loader.submit(adapter, self._placement.place(adapter, span))
        return True

    def _usable_slots(self, reserved_slots: int) -> list[int]:
        """Slots that may hold an adapter, the last ones first."""
        free: list[int] = np.flatnonzero(self.available() & ~self._held_slots)[::-1].tolist()
        return free if len(free) > reserved_slots else []

    def _end_load(self, adapter: Adapter, error: Exception | None) -> None:
        self._in_flight -= 1
        if error is not None:
            self._placement.remove(adapter)
            adapter.fail(error)
            self.metrics.failed.add()
            if adapter.error is not None:
                self._on_failure(adapter, error)

    def _evict_unused(self) -> None:
        for adapter in [self.table[name] for name in self._regions]:
            if adapter.is_idle and not adapter.pinned and adapter.name not in self.table.waiting:
                self._placement.evict(adapter, REMOVED)

    # Private, on the loader's thread.

    def _on_loaded(self, adapter: Adapter, error: Exception | None, seconds: float) -> None:
        if error is None:
            self.metrics.loaded.add(adapter.info.bytes)
            self.metrics.load_ms.observe(seconds * 1e3)
            adapter.failed_reads = 0
            adapter.state = READY
        self._ended_loads.append((adapter, error))
        self._on_change()
