"""The adapters in the memory that they share with the slots (Chameleon, section 4.1)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.adapter_cache.ahead import LoadsAhead
from shapeshift.adapter_cache.known import Known
from shapeshift.adapter_cache.loader import Loader, Store
from shapeshift.adapter_cache.meters import GONE, SLOT, CacheMeters
from shapeshift.adapter_cache.placement import Placement
from shapeshift.adapter_cache.pool import Pool
from shapeshift.adapter_cache.record import ABSENT, LOADING, READY, Adapter

Failed = Callable[[Adapter, Exception], None]


class AdapterCache:
    """See `interfaces.Memory` and `slots.Ground`. Adapters lie in a reserve behind the slots and in idle slots.

    What lies in a slot keeps it from requests only while it is used or being loaded; otherwise it goes when the
    slot is wanted. Places change on the generating thread alone, so that nothing moves during an iteration; the
    loader only fills what was given to it. keeps: False lets go of whatever nobody uses or waits for.

    known      what it knows of
    ahead      what it loads before it is asked to
    woken()    is called, on the loader's thread, when what waits may go on
    failed(adapter, error)  on the generating thread, when it cannot
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
        self.known = Known()
        self.ahead = LoadsAhead(self.known, self._begin)
        self._pool = Pool(slots, slot_elements, memory.numel())
        self._placement = Placement(memory, self._pool, self.known, algorithm, self.meters)
        self._slots, self._slot_tokens = slots, slot_tokens
        self._woken, self._failed = woken, failed
        self._keeps = keeps
        self._held = np.zeros(slots, bool)
        self._loader = Loader(self._loaded, write, lambda: bool(self._held.any()))
        self._promised = 0
        self._loading = 0
        self._ends: deque[tuple[Adapter, Exception | None]] = deque()

    # For any thread.

    @property
    def largest(self) -> int:
        """Elements of the largest adapter that can be held."""
        return self._pool.size(self._pool.reserve)

    @property
    def vacant_bytes(self) -> int:
        """Bytes of the reserve that no adapter has."""
        return self._pool.free(self._pool.reserve) * self._placement.width

    def elements(self, name: str | None) -> int:
        """Elements of the pool that an adapter takes; 0 for none."""
        return 0 if name is None else self.known[name].elements

    def queued(self, adapter: str | None) -> None:
        if adapter is not None:
            self.known.queued(adapter)

    def unqueued(self, adapter: str | None) -> None:
        if adapter is not None:
            self.known.unqueued(adapter)

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
        return 0 if adapter is None or self.resident(adapter) else self.known[adapter].info.bytes

    def resident(self, adapter: str | None) -> bool:
        return adapter is None or self.known[adapter].state == READY

    def acquire(self, adapter: str | None, tokens: int = 0) -> bool:
        one = None if adapter is None else self.known[adapter]
        if one is not None and one.state != READY:
            return False
        takes = one is not None and one.idle and self._pool.span(one.name).region != self._pool.reserve
        left = self.free_slots - takes
        if left * self._slot_tokens < tokens or (one is not None and left <= self._promised):
            return False
        if one is not None:
            self._use(one)
        self._promised += 1
        return True

    def release(self, adapter: str | None) -> None:
        if adapter is not None:
            self.known[adapter].users -= 1

    def want(self, adapter: str, beside: int = 0) -> bool:
        one = self.known[adapter]
        if one.error is not None:
            return False
        keep = max(-(-beside // self._slot_tokens), self._promised)
        return one.state != ABSENT or self._begin(one, keep=keep, fresh=True, evict=True, spare_waiting=False)

    # For the generating thread: what the model and the slots ask.

    def find(self, numbers: list[int]) -> tuple[list[torch.Tensor], int]:
        """The places of adapters in use, by number, and a version that changes when one of them moves."""
        found = [self.known.numbered(number).places for number in numbers]
        return [places for places in found if places is not None], self._placement.version

    def begin(self) -> None:
        self._promised = 0
        while self._ends:
            self._end(*self._ends.popleft())
        for one in self.known.outdated():
            if one.state == READY:
                self._placement.drop(one, GONE)
        if not self._keeps:
            self._let_go()
        for one in self.known.waited_for():
            if one.error is not None:
                # It came while the load failed.
                self._failed(one, one.error)
        self.ahead.run(self._loading)

    def open(self) -> npt.NDArray[np.bool_]:
        made = np.ones(self._slots, bool)
        for name in self._pool:
            region = self._pool.span(name).region
            if region != self._pool.reserve and not self.known[name].idle:
                made[region] = False
        return made

    def take(self, slot: int) -> None:
        for name in self._pool.within(slot):
            self._placement.drop(self.known[name], SLOT)
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
        for one in self.known.all():
            assert one.users >= 0, f"{one.name} has {one.users} users"
            assert one.state == READY or not one.users, f"{one.name} is used and not ready"
        loading = sum(one.state == LOADING for one in self.known.all())
        assert self._loading >= loading, "a load is lost"

    # Its own, on the generating thread.

    def _use(self, one: Adapter) -> None:
        (self.meters.misses if one.fresh else self.meters.hits).add()
        one.users += 1
        one.uses += 1
        one.fresh = False
        one.last, one.base = time.monotonic(), self._placement.clock

    def _begin(self, one: Adapter, *, keep: int, fresh: bool, evict: bool, spare_waiting: bool) -> bool:
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

    def _end(self, one: Adapter, error: Exception | None) -> None:
        self._loading -= 1
        if error is not None:
            self._pool.remove(one.name)
            one.state, one.places, one.error = ABSENT, None, error
            self.meters.failed.add()
            self._failed(one, error)

    def _let_go(self) -> None:
        """Drop whatever nobody uses or waits for."""
        for one in [self.known[name] for name in self._pool]:
            if one.idle and not one.pinned and one.name not in self.known.waiting:
                self._placement.drop(one, GONE)

    # The loader's thread.

    def _loaded(self, one: Adapter, error: Exception | None, seconds: float) -> None:
        if error is None:
            self.meters.loaded.add(one.info.bytes)
            self.meters.load_ms.observe(seconds * 1e3)
            one.state = READY
        self._ends.append((one, error))
        self._woken()
