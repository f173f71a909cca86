"""A pool of memory that keys, values and adapters share, without any tensor: see `adapter_cache.interfaces.Memory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shapeshift.adapter_cache import evict, prefetch
from shapeshift.adapter_cache.evict import EvictEntry
from shapeshift.adapter_cache.interfaces import AdapterInfo

_GUESS_S = 1.0
"""Between two looks at what may be asked for, as in the server."""


@dataclass(frozen=True)
class Caching:
    """keeps: whether adapters stay when nobody uses them; eviction: of `evict.ALGORITHMS`; predicts: whether idle
    memory is filled with what will probably be asked for; share: most of the pool that adapters may take."""

    keeps: bool = True
    eviction: str = "gdsf"
    predicts: bool = False
    share: float = 1.0


@dataclass
class _Resident:
    info: AdapterInfo
    freq: int = 0
    last: float = 0.0
    base: float = 0.0
    users: int = 0


class SimulatedPool:
    """Time stands in `now`, seconds; loads go one after the other over a link of `load_bytes_s`."""

    def __init__(
        self,
        adapters: Mapping[str, AdapterInfo],
        caching: Caching,
        pool_bytes: int,
        token_bytes: int,
        load_bytes_s: float,
    ) -> None:
        self.now = 0.0
        self.loaded_bytes = self.loads = self.hits = self.misses = self.evictions = 0
        self._adapters = adapters
        self._caching = caching
        self._bytes = pool_bytes
        self._token_bytes = token_bytes
        self._bytes_s = load_bytes_s
        self._resident: dict[str, _Resident] = {}
        self._loading: dict[str, float] = {}
        self._link_free = 0.0
        self._queued: dict[str, int] = {}
        self._seated = 0
        self._clock = 0.0
        self._histograms = prefetch.Histograms()
        self._next_guess = 0.0

    # Memory, as the admission sees it.

    @property
    def total_tokens(self) -> int:
        return self._bytes // self._token_bytes

    @property
    def free_tokens(self) -> int:
        used = sum(one.info.bytes for one in self._resident.values() if one.users)
        return (self._bytes - self._seated - used - self._loading_bytes()) // self._token_bytes

    def need(self, adapter: str | None) -> int:
        return 0 if adapter is None or adapter in self._resident else self._adapters[adapter].bytes

    def resident(self, adapter: str | None) -> bool:
        return adapter is None or adapter in self._resident

    def acquire(self, adapter: str | None, tokens: int = 0) -> bool:
        if adapter is None:
            return tokens <= self.free_tokens
        found = self._resident.get(adapter)
        taken = 0 if found is None or found.users else -(-found.info.bytes // self._token_bytes)
        if found is None or tokens > self.free_tokens - taken:
            return False
        found.users += 1
        found.freq += 1
        found.last, found.base = self.now, self._clock
        return True

    def release(self, adapter: str | None) -> None:
        if adapter is not None:
            self._resident[adapter].users -= 1
            self._drop_unused(adapter)

    def queued(self, adapter: str | None) -> None:
        if adapter is None:
            return
        there = adapter in self._resident
        self.hits += there
        self.misses += not there
        self._queued[adapter] = self._queued.get(adapter, 0) + 1
        self._histograms.arrived(adapter, self.now)
        if not there and self._adapters[adapter].bytes <= self._room():
            self.want(adapter)

    def unqueued(self, adapter: str | None) -> None:
        if adapter is not None:
            self._queued[adapter] -= 1
            if not self._queued[adapter]:
                del self._queued[adapter]
            self._drop_unused(adapter)

    def want(self, adapter: str, beside: int = 0) -> bool:
        if adapter in self._resident or adapter in self._loading:
            return True
        info = self._adapters[adapter]
        if info.bytes > (self.free_tokens - beside) * self._token_bytes or not self._make_room(info.bytes):
            return False
        self._link_free = max(self.now, self._link_free) + info.bytes / self._bytes_s
        self._loading[adapter] = self._link_free
        self.loads += 1
        self.loaded_bytes += info.bytes
        return True

    # What the simulation tells it.

    def seat(self, tokens: int) -> None:
        """A request takes `tokens` of cache; idle adapters give way."""
        self._seated += tokens * self._token_bytes
        fits = self._make_room(0)
        assert fits, "more was promised than the pool holds"

    def leave(self, tokens: int) -> None:
        """It gives them back."""
        self._seated -= tokens * self._token_bytes

    def next_load(self) -> float | None:
        """When the next load ends."""
        return min(self._loading.values(), default=None)

    def settle(self) -> None:
        """Let the loads that have ended by now be there, and begin others that are foretold."""
        for adapter in [name for name, at in self._loading.items() if at <= self.now]:
            del self._loading[adapter]
            self._resident[adapter] = _Resident(self._adapters[adapter], 0, self.now, self._clock)
            self._drop_unused(adapter)
        if self._caching.predicts and not self._loading and self.now >= self._next_guess:
            self._next_guess = self.now + _GUESS_S
            there = self._resident.keys()
            for name in prefetch.plan(self._histograms, list(self._adapters.values()), there, self._room(), self.now):
                self.want(name)

    def rank(self, adapter: str | None) -> int:
        return 0 if adapter is None else self._adapters[adapter].rank

    def check_integrity(self) -> None:
        """Raise AssertionError when more is held than there is, or somebody is counted twice."""
        assert self._room() >= 0, "the pool is overfull"
        assert not self._resident.keys() & self._loading.keys(), "an adapter is there and on its way"
        assert all(one.users >= 0 for one in self._resident.values()), "an adapter has lost a user"

    # Its own.

    def _loading_bytes(self) -> int:
        return sum(self._adapters[name].bytes for name in self._loading)

    def _room(self) -> int:
        """Bytes that nothing lies in; negative where a request has just been seated over idle adapters."""
        adapters = sum(one.info.bytes for one in self._resident.values()) + self._loading_bytes()
        return min(self._bytes - self._seated, int(self._bytes * self._caching.share)) - adapters

    def _make_room(self, needed: int) -> bool:
        entries = [
            EvictEntry(name, one.info.bytes, one.freq, one.last, one.users, name in self._queued, base=one.base)
            for name, one in self._resident.items()
        ]
        chosen, clock = evict.choose(entries, needed - self._room(), self._clock, self._caching.eviction, self.now)
        if chosen is None:
            return False
        self._clock = clock
        self.evictions += len(chosen)
        for name in chosen:
            del self._resident[name]
        return True

    def _drop_unused(self, adapter: str) -> None:
        found = self._resident.get(adapter)
        if found is not None and not self._caching.keeps and not found.users and adapter not in self._queued:
            del self._resident[adapter]
