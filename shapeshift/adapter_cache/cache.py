"""The adapters in the memory that they share with the slots (Chameleon, section 4.1)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.adapter_cache.loader import Loader, Store
from shapeshift.adapter_cache.meters import GONE, SLOT, CacheMeters
from shapeshift.adapter_cache.placement import Placement
from shapeshift.adapter_cache.pool import Pool
from shapeshift.adapter_cache.record import ABSENT, LOADING, READY, Adapter

_LINGER_S = 5.0
"""Seconds that a withdrawn adapter is still known, for requests that have just been given it."""
_MOST_AHEAD = 2
"""Loads under way beyond which nothing is loaded ahead."""

Failed = Callable[[Adapter, Exception], None]


class AdapterCache:
    """See `interfaces.Memory` and `slots.Ground`. Adapters lie in a reserve behind the slots and in idle slots.

    What lies in a slot keeps it from requests only while it is used or being loaded; otherwise it goes when the
    slot is wanted. Places change on the generating thread alone, so that nothing moves during an iteration; the
    loader only fills what was given to it. keeps: False lets go of whatever nobody uses or waits for.

    woken() is called, on the loader's thread, when what waits may go on; failed(adapter, error), on the generating
    thread, when it cannot.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        slots: int,
        slot_elements: int,
        slot_tokens: int,
        *,
        algorithm: str = "gdsf",
        keeps: bool = True,
        write: Store,
        woken: Callable[[], None],
        failed: Failed,
    ) -> None:
        self.meters = CacheMeters()
        self._known: dict[str, Adapter] = {}
        self._waiting: dict[str, int] = {}
        self._pool = Pool(slots, slot_elements, memory.numel())
        self._placement = Placement(memory, self._pool, self._known, self._waiting, algorithm, self.meters)
        self._slots, self._slot_tokens = slots, slot_tokens
        self._woken, self._failed = woken, failed
        self._keeps = keeps
        self._loader = Loader(self._loaded, write)
        self._by_number: dict[int, Adapter] = {}
        self._withdrawn: dict[str, tuple[Adapter, float]] = {}
        self._pinned: tuple[Adapter, ...] = ()
        self._held = np.zeros(slots, bool)
        self._promised = 0
        self._loading = 0
        self._ends: deque[tuple[Adapter, Exception | None]] = deque()
        self._guesses: deque[str] = deque()
        self._lock = threading.Lock()

    # For any thread.

    @property
    def largest(self) -> int:
        """Elements of the largest adapter that can be held."""
        return self._pool.size(self._pool.reserve)

    def add(self, adapter: Adapter) -> None:
        """`adapter` may be asked for from now on."""
        self._by_number[adapter.number] = adapter
        self._known[adapter.name] = adapter

    def withdraw(self, adapter: Adapter) -> None:
        """No further request will ask for `adapter`; it goes once nobody uses it or waits for it."""
        self._withdrawn[adapter.name] = adapter, time.monotonic() + _LINGER_S

    def pin(self, adapters: Iterable[Adapter]) -> None:
        """These, and no others, are loaded now and stay."""
        chosen = tuple(adapters)
        for one in [*self._pinned, *chosen]:
            one.pinned = one in chosen
        self._pinned = chosen

    def guess(self, name: str) -> None:
        """`name` may be asked for soon: it is loaded if nothing has to go for it."""
        self._guesses.append(name)

    def queued(self, adapter: str | None) -> None:
        if adapter is not None:
            with self._lock:
                self._waiting[adapter] = self._waiting.get(adapter, 0) + 1

    def unqueued(self, adapter: str | None) -> None:
        if adapter is not None:
            with self._lock:
                self._waiting[adapter] -= 1
                if not self._waiting[adapter]:
                    del self._waiting[adapter]

    @property
    def vacant_bytes(self) -> int:
        """Bytes of the reserve that no adapter has."""
        return self._pool.free(self._pool.reserve) * self._placement.width

    def elements(self, name: str | None) -> int:
        """Elements of the pool that an adapter takes; 0 for none."""
        return 0 if name is None else self._known[name].elements

    def residents(self) -> list[str]:
        """Names of what lies in the pool, ready or being loaded."""
        return list(self._pool)

    def close(self) -> None:
        """End the loads."""
        self._loader.close()

    # For the generating thread: what an admission asks.

    @property
    def free_slots(self) -> int:
        return int((self.open() & ~self._held).sum())

    @property
    def free_tokens(self) -> int:
        return self.free_slots * self._slot_tokens

    @property
    def total_tokens(self) -> int:
        return self._slots * self._slot_tokens

    def need(self, adapter: str | None) -> int:
        return 0 if adapter is None or self.resident(adapter) else self._known[adapter].info.bytes

    def resident(self, adapter: str | None) -> bool:
        return adapter is None or self._known[adapter].state == READY

    def acquire(self, adapter: str | None) -> bool:
        if adapter is not None and not self._use(self._known[adapter]):
            return False
        self._promised += 1
        return True

    def release(self, adapter: str | None) -> None:
        if adapter is not None:
            self._known[adapter].users -= 1

    def want(self, adapter: str, beside: int = 0) -> bool:
        one = self._known[adapter]
        if one.error is not None:
            return False
        keep = max(-(-beside // self._slot_tokens), self._promised)
        return one.state != ABSENT or self._begin(one, keep=keep, fresh=True)

    # For the generating thread: what the model and the slots ask.

    def find(self, numbers: list[int]) -> tuple[list[torch.Tensor], int]:
        """The places of adapters in use, by number, and a version that changes when one of them moves."""
        found = [self._by_number[number].places for number in numbers]
        return [places for places in found if places is not None], self._placement.version

    def begin(self) -> None:
        self._promised = 0
        while self._ends:
            self._end(*self._ends.popleft())
        for one, until in list(self._withdrawn.values()):
            self._forget(one, until)
        if not self._keeps:
            self._let_go()
        self._load_ahead()

    def open(self) -> npt.NDArray[np.bool_]:
        made = np.ones(self._slots, bool)
        for name in self._pool:
            region = self._pool.span(name).region
            if region != self._pool.reserve and not self._known[name].idle:
                made[region] = False
        return made

    def take(self, slot: int) -> None:
        for name in self._pool.within(slot):
            self._placement.drop(name, SLOT)
        self._held[slot] = True

    def leave(self, slot: int) -> None:
        self._held[slot] = False

    def check_integrity(self) -> None:
        """Raise AssertionError when places, states and counts contradict one another."""
        self._placement.check_integrity()
        for name in self._pool:
            region = self._pool.span(name).region
            held = region != self._pool.reserve and self._held[region]
            assert not held, f"{name} lies in a slot that a request holds"
        for one in list(self._known.values()):
            assert one.users >= 0, f"{one.name} has {one.users} users"
            assert one.state == READY or not one.users, f"{one.name} is used and not ready"
        loading = sum(one.state == LOADING for one in list(self._known.values()))
        assert self._loading >= loading, "a load is lost"

    # Its own, on the generating thread.

    def _use(self, one: Adapter) -> bool:
        if one.state != READY:
            return False
        takes = self._pool.span(one.name).region != self._pool.reserve and one.idle
        if self.free_slots - takes <= self._promised:
            return False
        (self.meters.misses if one.fresh else self.meters.hits).add()
        one.users += 1
        one.uses += 1
        one.fresh = False
        one.last, one.base = time.monotonic(), self._placement.clock
        return True

    def _begin(self, one: Adapter, *, keep: int, fresh: bool, evict: bool = True, spare_waiting: bool = False) -> bool:
        """Give `one` a place and begin to load it; more than `keep` slots are left to requests."""
        slots = self._spare_slots(keep)
        span = self._placement.vacant(one, slots)
        if span is None and evict:
            span = self._placement.make_room(one, slots, spare_waiting)
        if span is None:
            return False
        one.state, one.fresh = LOADING, fresh
        self._loading += 1
        self._loader.submit(one, self._placement.settle(one, span))
        return True

    def _spare_slots(self, keep: int) -> list[int]:
        """Slots that a load may lie in, the last ones first."""
        free: list[int] = np.flatnonzero(self.open() & ~self._held)[::-1].tolist()
        return free if len(free) > keep else []

    def _load_ahead(self) -> None:
        """Load what is pinned, what requests wait for, and what may come, in this order, while there is room."""
        for one in self._pinned:
            if self._absent(one) and not (self._room_ahead() and self._begin(one, keep=2, fresh=False)):
                break
        with self._lock:
            waiting = [self._known[name] for name in self._waiting if self._absent(self._known[name])]
        for one in waiting:
            if not (self._room_ahead() and self._begin(one, keep=2, fresh=True, spare_waiting=True)):
                break
        while self._guesses and self._room_ahead():
            guessed = self._known.get(self._guesses.popleft())
            if guessed is not None and self._absent(guessed):
                self._begin(guessed, keep=2, fresh=False, evict=False)

    def _absent(self, one: Adapter) -> bool:
        return one.state == ABSENT and one.error is None

    def _room_ahead(self) -> bool:
        return self._loading < _MOST_AHEAD

    def _end(self, one: Adapter, error: Exception | None) -> None:
        self._loading -= 1
        if error is not None:
            self._pool.remove(one.name)
            one.state, one.places, one.error = ABSENT, None, error
            self.meters.failed.add()
            self._failed(one, error)

    def _forget(self, one: Adapter, until: float) -> None:
        with self._lock:
            waits = one.name in self._waiting
        if waits or one.users or one.state == LOADING:
            return
        if one.state == READY:
            self._placement.drop(one.name, GONE)
        if time.monotonic() > until:
            del self._withdrawn[one.name], self._known[one.name], self._by_number[one.number]

    def _let_go(self) -> None:
        """Drop whatever nobody uses or waits for."""
        with self._lock:
            waiting = set(self._waiting)
        for one in [self._known[name] for name in self._pool]:
            if one.idle and not one.pinned and one.name not in waiting:
                self._placement.drop(one.name, GONE)

    # The loader's thread.

    def _loaded(self, one: Adapter, error: Exception | None, seconds: float) -> None:
        if error is None:
            self.meters.loaded.add(one.info.bytes)
            self.meters.load_ms.observe(seconds * 1e3)
            one.state = READY
        self._ends.append((one, error))
        self._woken()
