"""The cache of adapters in the memory that they share with the texts of requests (Chameleon, section 4.1)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

import torch

from shapeshift.adapter_cache.memory.adapter_table import ABSENT, LOADING, READY, Adapter, AdapterTable
from shapeshift.adapter_cache.memory.loader import Load, Loader
from shapeshift.adapter_cache.memory.placement import REMOVED, Placement, SharedMemory
from shapeshift.adapter_cache.policy.eviction import RankedEviction
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, blocks_of
from shapeshift.serving import events
from shapeshift.serving.metrics import Counter, Counters, Histogram, Metric

_MAX_PRELOADS = 2
"""Loads in flight beyond which nothing is preloaded."""
_REQUEST_TEXTS = 2
"""Longest texts for which preloads leave blocks."""

_RECORD_PERIOD_S = 5.0

_LOAD_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
MAX_LABELS = 100

OnFailure = Callable[[Adapter, Exception], None]


class Preloader:
    """Loads adapters before a request is admitted: pinned ones, those that requests wait for, and predicted ones.

    Any thread may call `pin` and `prefetch`; the generating thread calls `run`.
    """

    def __init__(self, table: AdapterTable, text_blocks: int, start_load: Callable[..., bool]) -> None:
        """start_load: see `AdapterCache._start_load`."""
        self._table = table
        self._reserved_blocks = _REQUEST_TEXTS * text_blocks
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
                if left <= 0 or not self._load(adapter, on_demand, evict=True):
                    return
                left -= 1
        while self._predicted and left > 0:
            predicted = self._table.by_name.get(self._predicted.popleft())
            if predicted is not None and _is_loadable(predicted):
                left -= self._load(predicted, on_demand=False, evict=False)

    def _load(self, adapter: Adapter, on_demand: bool, evict: bool) -> bool:
        """Start a load, for which no adapter goes that a request waits for."""
        return self._start_load(
            adapter,
            reserved_blocks=self._reserved_blocks,
            on_demand=on_demand,
            evict=evict,
            spared=self._table.waiting,
        )


def _is_loadable(adapter: Adapter) -> bool:
    return adapter.state == ABSENT and adapter.error is None


class CacheMetrics:
    """Counters of one cache."""

    def __init__(self) -> None:
        self.hits = Counter("adapter_hits_total", "Admitted requests whose adapter was resident already")
        self.misses = Counter("adapter_misses_total", "Admitted requests whose adapter had to be loaded for them")
        self.loaded = Counter("adapter_loaded_bytes_total", "Bytes of adapters loaded")
        self.host_loads = Counter("adapter_host_loads_total", "Loads to a GPU from the memory of the host")
        self.load_ms = Histogram("adapter_load_ms", "Time of a load", _LOAD_MS)
        self.failed = Counter("adapter_load_failures_total", "Loads that failed")
        self.refused = Counter("adapter_refusals_total", "Registry entries that were refused after a change")
        self.requests = Counters("adapter_requests_total", "Requests by adapter", "adapter", MAX_LABELS)


class AdapterCache:
    """See `policy.scheduling.AdapterMemory` and `fused_decode.interfaces.BlockBorrower`.

    Adapters are in a reserve behind the blocks and in blocks that no text holds. An adapter that is in use or loading
    keeps its blocks; any other one is evicted when a text needs them. Only the generating thread changes places, so
    nothing moves during an iteration; the loader's thread only fills the memory that it is given.

    table         all adapters
    preload       loads before admission
    on_change()   called on the loader's thread when waiting requests may be admissible
    on_failure(adapter, error)  called on the generating thread when a load fails for longer
    loads         in flight
    open_host     makes a `host_tier.HostTier` for a GPU, of a rule and of what is called for each load that it serves;
                  None: loads go straight to the memory
    """

    def __init__(
        self,
        memory: SharedMemory,
        *,
        rule: RankedEviction,
        load: Load,
        on_change: Callable[[], None],
        on_failure: OnFailure,
        open_host: Callable[..., Any] | None = None,
    ) -> None:
        self.metrics = CacheMetrics()
        self.table = AdapterTable()
        self.preload = Preloader(self.table, memory.text_blocks, self._start_load)
        self._pool = memory.pool
        self.placement = Placement(memory, self.table, rule)
        self._on_change, self._on_failure = on_change, on_failure
        self._keeps_unused = rule.keeps_unused
        host = None if open_host is None else open_host(rule, self.metrics.host_loads.add)
        self._loader = Loader(self._on_loaded, load, lambda: self._pool.held > 0, host)
        self.loads = 0
        self._ended_loads: deque[tuple[Adapter, Exception | None]] = deque()
        self._record_at = 0.0
        self._pool.borrower = self

    # Any thread.

    @property
    def max_elements(self) -> int:
        """Elements of the largest adapter that fits."""
        return self.placement.reserve.size

    def free_reserve_bytes(self) -> int:
        """Bytes of the reserve that no adapter has."""
        return self.placement.reserve.free * self.placement.element_bytes

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
        return list(self.placement)

    def close(self) -> None:
        """Finish the current load and end the loader's thread."""
        self._loader.close()

    @property
    def exported(self) -> list[Metric]:
        """All counters."""
        return [*vars(self.metrics).values(), *self.placement.evictions.values()]

    # `AdapterMemory`, on the generating thread.

    @property
    def free_tokens(self) -> int:
        return self._pool.available * BLOCK_TOKENS

    @property
    def total_tokens(self) -> int:
        return self._pool.count * BLOCK_TOKENS

    def resident(self, adapter: str | None) -> bool:
        return adapter is None or self.table[adapter].state == READY

    def acquire(self, adapter: str | None, tokens: int = 0) -> bool:
        used = None if adapter is None else self.table[adapter]
        if used is not None and used.state != READY:
            return False
        held = self.placement.run_blocks(used.name) if used is not None and used.is_idle else 0
        if self.free_tokens - held * BLOCK_TOKENS < tokens:
            return False
        if used is not None:
            self._use(used)
        return True

    def release(self, adapter: str | None) -> None:
        if adapter is not None:
            self.table[adapter].users -= 1

    def start_load(self, adapter: str, reserved_tokens: int = 0, spared: Collection[str] = ()) -> bool:
        record = self.table[adapter]
        if record.error is not None:
            return False
        return record.state != ABSENT or self._start_load(
            record, reserved_blocks=blocks_of(reserved_tokens), on_demand=True, evict=True, spared=spared
        )

    # `BlockBorrower` and the LoRA hook, on the generating thread.

    def places_of(self, numbers: list[int]) -> tuple[list[torch.Tensor], int]:
        """The places of adapters in use, by number, and a version that changes when one of them moves."""
        adapters = map(self.table.numbered, numbers)
        return [one.places for one in adapters if one.places is not None], self.placement.version

    def has_magnitudes(self, number: int) -> bool:
        """Whether the adapter in use with this number is a DoRA."""
        return self.table.numbered(number).source.has_magnitudes

    def begin_iteration(self) -> None:
        while self._ended_loads:
            self._end_load(*self._ended_loads.popleft())
        for adapter in self.table.pop_unused():
            if adapter.state == READY:
                self.placement.evict(adapter, REMOVED)
        if not self._keeps_unused:
            self._evict_unused()
        for adapter in self.table.waiting_adapters():
            if (error := adapter.error) is not None:
                # A request that arrived while the load failed.
                self._on_failure(adapter, error)
        self.preload.run(self.loads)
        if (now := time.monotonic()) >= self._record_at:
            self._record_at = now + _RECORD_PERIOD_S
            if events.is_recording():
                self._record_residents()

    @property
    def reclaimable(self) -> int:
        return self.placement.idle_blocks

    def reclaim(self, blocks: int) -> None:
        self.placement.reclaim(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError if places, states and counts contradict each other."""
        self.placement.check_integrity()
        for adapter in self.table.all():
            assert adapter.users >= 0, f"{adapter.name} has {adapter.users} users"
            assert adapter.state == READY or not adapter.users, f"{adapter.name} is in use but not ready"
        loading = sum(adapter.state == LOADING for adapter in self.table.all())
        assert self.loads >= loading, "a load is lost"

    # Private, on the generating thread.

    def _use(self, adapter: Adapter) -> None:
        (self.metrics.misses if adapter.on_demand else self.metrics.hits).add()
        adapter.users += 1
        adapter.uses += 1
        adapter.on_demand = False
        adapter.last, adapter.base = time.monotonic(), self.placement.clock

    def _start_load(
        self, adapter: Adapter, *, reserved_blocks: int, on_demand: bool, evict: bool, spared: Container[str]
    ) -> bool:
        """Find space for `adapter` and start to load it; False if there is none.

        Blocks are used only if `reserved_blocks` stay available to texts. evict: whether idle adapters may be evicted;
        spared: except these.
        """
        span = self.placement.find(adapter, reserved_blocks)
        if span is None and evict:
            span = self.placement.evict_for(adapter, reserved_blocks, spared)
        if span is None:
            return False
        adapter.state, adapter.on_demand = LOADING, on_demand
        self.loads += 1
        self._loader.submit(adapter, self.placement.place(adapter, span))
        return True

    def _end_load(self, adapter: Adapter, error: Exception | None) -> None:
        self.loads -= 1
        if error is not None:
            self.placement.remove(adapter)
            adapter.fail(error)
            self.metrics.failed.add()
            if adapter.error is not None:
                self._on_failure(adapter, error)

    def _record_residents(self) -> None:
        """Record what is in memory: who reads later has not seen the loads."""
        adapters = [self.table[name] for name in self.placement]
        run_blocks = self.placement.run_blocks
        rows = [(one.label, one.info.bytes, one.uses, one.users, run_blocks(one.name)) for one in adapters]
        events.record_rows("residents", rows)

    def _evict_unused(self) -> None:
        for adapter in [self.table[name] for name in self.placement]:
            if adapter.is_idle and not adapter.pinned and adapter.name not in self.table.waiting:
                self.placement.evict(adapter, REMOVED)

    # Private, on the loader's thread.

    def _on_loaded(self, adapter: Adapter, error: Exception | None, seconds: float) -> None:
        if error is None:
            self.metrics.loaded.add(adapter.info.bytes)
            self.metrics.load_ms.observe(seconds * 1e3)
            adapter.failed_reads = 0
            ended = time.monotonic()
            adapter.load = (ended - seconds, ended)
            adapter.state = READY
            took_ms = round(seconds * 1e3, 1)
            events.record("load", adapter=adapter.label, bytes=adapter.info.bytes, ms=took_ms)
        self._ended_loads.append((adapter, error))
        self._on_change()
