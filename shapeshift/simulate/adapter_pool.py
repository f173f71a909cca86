"""A simulated memory of keys, values and adapters: `adapter_cache.policy.scheduling.AdapterMemory` without a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shapeshift.adapter_cache.policy.eviction import EvictEntry
from shapeshift.adapter_cache.policy.prefetch import GapHistograms
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import EVICTION_RULES
from shapeshift.simulate.events import Events

_PREFETCH_S = 1.0
"""Seconds between two prefetch plans, as in the server."""


@dataclass(frozen=True)
class CacheOptions:
    """eviction, prefetch: as in `AdapterCacheSettings`.

    share: largest share of the pool for adapters; reserve_bytes: of the pool, which adapters alone may hold; loaded:
    adapters that are in it at the start, as far as they fit.
    """

    eviction: str = "gdsf"
    prefetch: bool = False
    share: float = 1.0
    reserve_bytes: int = 0
    loaded: Sequence[str] = ()


@dataclass
class _Resident:
    info: AdapterInfo
    freq: int = 0
    last: float = 0.0
    base: float = 0.0
    users: int = 0


class SimulatedPool:
    """Loads run one after the other over a link of `load_bytes_s`."""

    def __init__(
        self,
        events: Events,
        adapters: Mapping[str, AdapterInfo],
        options: CacheOptions,
        pool_bytes: int,
        token_bytes: int,
        load_bytes_s: float,
    ) -> None:
        self._events = events
        self.loaded_bytes = self.hits = self.misses = 0
        self._adapters = adapters
        self._options = options
        self._rule = EVICTION_RULES[options.eviction]
        self._bytes = pool_bytes
        self._token_bytes = token_bytes
        self._bytes_s = load_bytes_s
        self._resident: dict[str, _Resident] = {}
        self._loading: dict[str, float] = {}
        self._link_free = 0.0
        self._queued: dict[str, int] = {}
        self._request_bytes = 0
        self._clock = 0.0
        self._histograms = GapHistograms()
        self._next_prefetch = 0.0
        for name in options.loaded:
            if adapters[name].bytes <= self._free_bytes():
                self._resident[name] = _Resident(adapters[name])

    @property
    def now(self) -> float:
        """Seconds."""
        return self._events.now

    # See `adapter_cache.policy.scheduling.AdapterMemory`.

    @property
    def total_tokens(self) -> int:
        return (self._bytes - self._options.reserve_bytes) // self._token_bytes

    @property
    def free_tokens(self) -> int:
        return self._granted(0) // self._token_bytes

    def resident(self, adapter: str | None) -> bool:
        return adapter is None or adapter in self._resident

    def acquire(self, adapter: str | None, tokens: int = 0) -> bool:
        if adapter is None:
            return tokens <= self.free_tokens
        resident = self._resident.get(adapter)
        if resident is None:
            return False
        if tokens > self._granted(0 if resident.users else resident.info.bytes) // self._token_bytes:
            return False
        resident.users += 1
        resident.freq += 1
        resident.last, resident.base = self.now, self._clock
        return True

    def release(self, adapter: str | None) -> None:
        if adapter is not None:
            self._resident[adapter].users -= 1
            self._drop_unused(adapter)

    def queued(self, adapter: str | None) -> None:
        """Count a waiting request, and load its adapter where there is room without eviction."""
        if adapter is None:
            return
        is_resident = adapter in self._resident
        self.hits += is_resident
        self.misses += not is_resident
        self._queued[adapter] = self._queued.get(adapter, 0) + 1
        self._histograms.record(adapter, self.now)
        if not is_resident and self._adapters[adapter].bytes <= self._free_bytes():
            self.start_load(adapter)

    def unqueued(self, adapter: str | None) -> None:
        if adapter is not None:
            self._queued[adapter] -= 1
            if not self._queued[adapter]:
                del self._queued[adapter]
            self._drop_unused(adapter)

    def start_load(self, adapter: str, reserved_tokens: int = 0, spared: Collection[str] = ()) -> bool:
        if adapter in self._resident or adapter in self._loading:
            return True
        info = self._adapters[adapter]
        reserved_bytes = reserved_tokens * self._token_bytes
        if self._granted(info.bytes) < reserved_bytes or not self._evict_for(info.bytes, spared):
            return False
        self._link_free = max(self.now, self._link_free) + info.bytes / self._bytes_s
        self._loading[adapter] = self._link_free
        self.loaded_bytes += info.bytes
        return True

    # The simulated loop.

    def take(self, tokens: int) -> None:
        """A request takes `tokens` of KV cache; idle adapters are evicted for it, and the last loads are put off."""
        self._request_bytes += tokens * self._token_bytes
        while not (fits := self._evict_for(0)) and self._loading:
            self._put_off(max(self._loading, key=self._loading.__getitem__))
        assert fits, "more is granted than the pool holds"

    def leave(self, tokens: int) -> None:
        """A request returns `tokens` of KV cache."""
        self._request_bytes -= tokens * self._token_bytes

    def next_load(self) -> float | None:
        """The end of the current load, in seconds; None if there is none."""
        return min(self._loading.values(), default=None)

    def end_loads(self) -> None:
        """End the loads that are due, and start to prefetch."""
        for adapter in [name for name, at in self._loading.items() if at <= self.now]:
            del self._loading[adapter]
            self._resident[adapter] = _Resident(self._adapters[adapter], 0, self.now, self._clock)
            self._drop_unused(adapter)
        if self._options.prefetch and not self._loading and self.now >= self._next_prefetch:
            self._next_prefetch = self.now + _PREFETCH_S
            infos = list(self._adapters.values())
            for name in self._histograms.plan(infos, self._resident.keys(), self._free_bytes(), self.now):
                self.start_load(name)

    def rank(self, adapter: str | None) -> int:
        """The rank of an adapter; 0 for None."""
        return 0 if adapter is None else self._adapters[adapter].rank

    def check_integrity(self) -> None:
        """Raise AssertionError if the pool is overfull or its counts contradict each other."""
        assert self._free_bytes() >= 0, "the pool is overfull"
        assert not self._resident.keys() & self._loading.keys(), "an adapter is both resident and loading"
        assert all(resident.users >= 0 for resident in self._resident.values()), "an adapter has negative users"

    # Private.

    def _put_off(self, adapter: str) -> None:
        """Forget the last load; a request that needs it starts it again."""
        del self._loading[adapter]
        size = self._adapters[adapter].bytes
        self._link_free -= size / self._bytes_s
        self.loaded_bytes -= size

    def _loading_bytes(self) -> int:
        return sum(self._adapters[name].bytes for name in self._loading)

    def _granted(self, more: int) -> int:
        """Bytes that requests may still take beside the adapters in use, and `more` bytes of adapters."""
        used = sum(resident.info.bytes for resident in self._resident.values() if resident.users)
        held = max(self._options.reserve_bytes, used + self._loading_bytes() + more)
        return self._bytes - self._request_bytes - held

    def _free_bytes(self) -> int:
        """Unused bytes; negative when a request has just taken memory of idle adapters."""
        adapters = sum(resident.info.bytes for resident in self._resident.values()) + self._loading_bytes()
        return min(self._bytes - self._request_bytes, int(self._bytes * self._options.share)) - adapters

    def _evict_for(self, needed: int, spared: Collection[str] = ()) -> bool:
        """Evict until `needed` bytes are free; False, and nothing is evicted, if that is impossible."""
        queued = self._queued
        entries = [
            EvictEntry(name, one.info.bytes, one.freq, one.last, one.users, name in queued, name in spared, one.base)
            for name, one in self._resident.items()
        ]
        chosen, clock = self._rule.choose(entries, needed - self._free_bytes(), self._clock, self.now)
        if chosen is None:
            return False
        self._clock = clock
        for name in chosen:
            del self._resident[name]
        return True

    def _drop_unused(self, adapter: str) -> None:
        resident = self._resident.get(adapter)
        if resident is not None and not self._rule.keeps_unused and not resident.users and adapter not in self._queued:
            del self._resident[adapter]
