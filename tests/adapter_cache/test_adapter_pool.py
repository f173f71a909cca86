"""Who lies where: places in the pool, evictions, loads, pins, and the slots that requests take back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shapeshift.adapter_cache import loader
from shapeshift.adapter_cache.cache import AdapterCache
from shapeshift.adapter_cache.interfaces import AdapterInfo
from shapeshift.adapter_cache.layout import moved
from shapeshift.adapter_cache.meters import GONE, ROOM, SLOT
from shapeshift.adapter_cache.peft import PeftAdapter
from shapeshift.adapter_cache.pool import Pool, Span
from shapeshift.adapter_cache.record import LOADING, READY, Adapter

SLOT_ELEMENTS = 256
TOKENS = 16


def adapter(name: str, elements: int) -> Adapter:
    """A record without a file: its memory is filled with its number."""
    relative = torch.zeros(1, 1, 1, 4, dtype=torch.int64)
    relative[..., 1] = 1
    source = PeftAdapter(Path(name), 1, (), (0, 0))
    return Adapter(AdapterInfo(name, 1, elements * 4), name, "", source, relative, elements, verified=True)


class House:
    """A cache whose loads wait for `gate` and write an adapter's number everywhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int = 4, reserve: int = 512, algorithm: str = "gdsf"):
        self.gate = threading.Event()
        self.gate.set()
        self.fails: set[str] = set()
        self.failed: list[tuple[str, str]] = []
        self.woken = threading.Semaphore(0)
        monkeypatch.setattr(loader, "fill", self._fill)
        self.memory = torch.zeros(slots * SLOT_ELEMENTS + reserve)
        self.cache = AdapterCache(
            self.memory,
            slots,
            SLOT_ELEMENTS,
            TOKENS,
            algorithm=algorithm,
            write=loader.store,
            woken=self.woken.release,
            failed=lambda one, error: self.failed.append((one.name, str(error))),
        )
        self.adapters: dict[str, Adapter] = {}

    def _fill(self, target: torch.Tensor, one: Adapter, *others: object) -> None:
        assert self.gate.wait(30)
        if one.name in self.fails:
            raise OSError("gone")
        target.fill_(one.number)

    def add(self, name: str, elements: int) -> Adapter:
        self.adapters[name] = made = adapter(name, elements)
        self.cache.known.add(made)
        return made

    def load(self, name: str, beside: int = 0) -> bool:
        """Ask for it and wait until it is there."""
        if not self.cache.want(name, beside):
            return False
        self.settle()
        return True

    def settle(self) -> None:
        """Until no load is under way."""
        deadline = time.monotonic() + 30
        while any(one.state == LOADING for one in self.adapters.values()) or self.cache._loading:
            assert time.monotonic() < deadline
            self.cache.begin()
            time.sleep(0.001)
        self.cache.check_integrity()

    def holds(self, name: str) -> bool:
        """Whether it is ready, and its memory what was loaded."""
        one = self.adapters[name]
        if one.state != READY:
            return False
        span = self.cache._pool.span(name)
        assert (self.memory[span.start : span.end] == one.number).all(), f"{name} was overwritten"
        assert one.places is not None and torch.equal(one.places, moved(one.relative, span.start))
        return True

    def region(self, name: str) -> int:
        return self.cache._pool.span(name).region


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(**options: int | str) -> House:
        made.append(House(monkeypatch, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.gate.set()
        one.settle()
        one.cache.close()


# The loader.


def test_a_load_rests_while_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, rested = threading.Event(), []
    clock = iter(range(1000))
    told = SimpleNamespace(thread_time=lambda: next(clock) / 1e4, sleep=rested.append, monotonic=time.monotonic)
    monkeypatch.setattr(loader, "time", told)

    def fill(target: torch.Tensor, one: Adapter, write: object, rest: Callable[[], None]) -> None:
        for busy[0] in (True, False, True):
            rest()

    monkeypatch.setattr(loader, "fill", fill)
    busy = [False]
    one = loader.Loader(lambda *_: ended.set(), busy=lambda: busy[0])
    one.submit(adapter("a", 32), torch.zeros(32))
    assert ended.wait(30)
    one.close()
    assert rested == pytest.approx([loader._REST / 1e4] * 2)


# The pool.


def test_holes_are_found_where_they_are() -> None:
    pool = Pool(slots=2, slot=100, total=400)
    assert pool.hole(2, 200) is None, "the reserve begins at a multiple of the alignment"
    assert pool.hole(2, 176) == Span(2, 224, 176)
    pool.put("a", Span(2, 224, 40))
    pool.put("b", Span(2, 320, 10))
    assert pool.hole(2, 32) == Span(2, 288, 32)
    assert pool.hole(2, 33) == Span(2, 352, 33)
    assert pool.hole(2, 49) is None
    pool.check_integrity()
    pool.remove("a")
    assert pool.hole(2, 96) == Span(2, 224, 96)
    assert list(pool) == pool.within(2) == ["b"]


def test_overlaps_are_noticed() -> None:
    pool = Pool(slots=1, slot=64, total=256)
    pool.put("a", Span(1, 64, 64))
    pool.put("b", Span(1, 96, 32))
    with pytest.raises(AssertionError, match="overlaps"):
        pool.check_integrity()


# The cache.


def test_idle_slots_hold_what_the_reserve_cannot(house: Callable[..., House]) -> None:
    made = house()
    for name in "abcd":
        made.add(name, 250)
        assert made.load(name)
    assert all(map(made.holds, "abcd"))
    assert [made.region(name) for name in "abcd"] == [4, 4, 3, 2]
    assert made.cache.free_tokens == 4 * TOKENS
    made.cache.take(3)
    assert not made.holds("c") and made.holds("d")
    assert made.cache.meters.evictions[SLOT].value == 1
    assert made.cache.free_tokens == 3 * TOKENS
    made.cache.leave(3)
    made.cache.check_integrity()


def test_what_is_used_keeps_its_slot(house: Callable[..., House]) -> None:
    made = house(slots=2, reserve=64)
    made.add("a", 200)
    assert made.load("a") and made.region("a") == 1
    assert made.cache.acquire("a")
    assert made.cache.open().tolist() == [True, False]
    assert made.cache.free_tokens == TOKENS
    assert made.cache.acquire(None), "the base is always there"
    made.cache.begin()
    made.add("b", 200)
    assert not made.cache.want("b", beside=TOKENS), "it would take the slot that was promised"
    made.cache.release("a")
    assert made.cache.open().all()


def test_who_would_get_no_slot_is_not_admitted(house: Callable[..., House]) -> None:
    made = house(slots=2, reserve=64)
    made.add("a", 200)
    assert made.load("a")
    made.cache.take(0)
    assert not made.cache.acquire("a"), "it lies in the only slot that is left"
    assert made.cache.acquire(None)
    made.cache.leave(0)
    made.cache.begin()
    assert made.cache.acquire("a")


def test_loads_that_are_wanted_by_the_waiting_stay(house: Callable[..., House]) -> None:
    made = house(slots=1, reserve=1024)
    for name in "abc":
        made.add(name, 400)
    assert made.load("a") and made.load("b")
    made.cache.queued("a")
    assert made.load("c")
    assert made.holds("a") and made.holds("c") and not made.holds("b")
    assert made.cache.meters.evictions[ROOM].value == 1
    made.cache.unqueued("a")


def test_a_request_in_line_is_loaded_ahead(house: Callable[..., House]) -> None:
    made = house()
    made.add("a", 100)
    made.cache.queued("a")
    made.cache.begin()
    made.settle()
    assert made.holds("a")
    assert made.cache.acquire("a")
    made.cache.unqueued("a")
    assert (made.cache.meters.misses.value, made.cache.meters.hits.value) == (1, 0)
    assert made.cache.acquire("a")
    assert (made.cache.meters.misses.value, made.cache.meters.hits.value) == (1, 1)
    assert made.cache.meters.loaded.value == 400


def test_a_guess_takes_nobody_s_place(house: Callable[..., House]) -> None:
    made = house(slots=1, reserve=256)
    made.add("a", 256), made.add("b", 200), made.add("c", 256)
    assert made.load("a")
    made.cache.ahead.guess("c")
    made.cache.ahead.guess("nobody")
    made.cache.begin()
    made.settle()
    assert made.holds("a") and not made.holds("c")
    made.cache.known.withdraw(made.adapters["a"])
    made.cache.begin()
    assert made.cache.meters.evictions[GONE].value == 1
    made.cache.ahead.guess("c")
    made.cache.begin()
    made.settle()
    assert made.holds("c")


def test_pins_are_loaded_and_stay(house: Callable[..., House]) -> None:
    made = house(slots=2, reserve=512)
    pinned = made.add("p", 100)
    for name in "abcdef":
        made.add(name, 240)
    made.cache.ahead.pin([pinned])
    made.cache.begin()
    made.settle()
    for name in "abcdef":
        assert made.load(name)
        assert made.holds("p") and made.region("p") == 2
    made.cache.ahead.pin([])
    assert not pinned.pinned


def test_gaps_are_closed_around_what_is_used(house: Callable[..., House]) -> None:
    made = house(slots=1, reserve=512)
    for name in "abcd":
        made.add(name, 128)
        assert made.load(name)
    assert made.cache.acquire("b")
    version = made.cache.find([made.adapters["b"].number])[1]
    made.cache.known.withdraw(made.adapters["a"])
    made.cache.known.withdraw(made.adapters["c"])
    made.cache.begin()
    made.adapters["big"] = adapter("big", 256)
    made.cache.known.add(made.adapters["big"])
    assert made.load("big")
    assert made.holds("b") and made.holds("d") and made.holds("big")
    assert made.cache.find([made.adapters["b"].number])[1] != version
    made.cache.release("b")


def test_withdrawn_while_used_and_waited_for(house: Callable[..., House]) -> None:
    made = house()
    one = made.add("a", 100)
    assert made.load("a")
    assert made.cache.acquire("a")
    made.cache.queued("a")
    made.cache.known.withdraw(one)
    made.cache.begin()
    assert made.holds("a")
    made.cache.release("a")
    made.cache.begin()
    assert made.holds("a"), "a request still waits for it"
    made.cache.unqueued("a")
    made.cache.begin()
    assert made.cache.residents() == []
    made.adapters.clear()
    made.cache.check_integrity()


def test_a_load_that_fails_leaves_nothing(house: Callable[..., House]) -> None:
    made = house()
    made.add("a", 100)
    made.fails.add("a")
    assert made.load("a")
    assert made.failed == [("a", "gone")]
    assert not made.holds("a") and made.cache.residents() == []
    assert made.cache.meters.failed.value == 1
    made.cache.queued("a")
    made.cache.begin()
    assert made.cache.residents() == [], "it is not tried again and again"
    made.cache.unqueued("a")


def test_too_large_for_now(house: Callable[..., House]) -> None:
    made = house(slots=1, reserve=512)
    made.add("a", 400), made.add("b", 400)
    assert made.load("a")
    assert made.cache.acquire("a")
    assert not made.cache.want("b")
    assert made.holds("a")
    made.cache.release("a")
    assert made.load("b")
    assert not made.holds("a")


@pytest.mark.parametrize("algorithm", ["gdsf", "score", "lru", "lfu", "fair"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_whatever_happens(house: Callable[..., House], algorithm: str, seed: int) -> None:
    rng = random.Random(seed)
    made = house(slots=5, reserve=700, algorithm=algorithm)
    names = [f"a{number}" for number in range(24)]
    for name in names:
        made.add(name, rng.choice((40, 100, 180, 250, 500)))
    running: list[tuple[str | None, int]] = []
    waiting: list[str] = []
    loads = 0
    for _ in range(400):
        made.cache.begin()
        free = np.flatnonzero(made.cache.open() & ~made.cache._held).tolist()
        for name in [name for name in waiting if made.cache.resident(name)]:
            if free and made.cache.acquire(name):
                waiting.remove(name)
                made.cache.unqueued(name)
                slot = next(s for s in np.flatnonzero(made.cache.open() & ~made.cache._held).tolist())
                made.cache.take(slot)
                running.append((name, slot))
                free = np.flatnonzero(made.cache.open() & ~made.cache._held).tolist()
                made.cache._promised = 0
        action = rng.random()
        if action < 0.5 and len(waiting) < 8:
            waiting.append(rng.choice(names))
            made.cache.queued(waiting[-1])
        elif action < 0.8 and waiting:
            loads += made.cache.want(waiting[0])
        if rng.random() < 0.4 and running:
            name, slot = running.pop(rng.randrange(len(running)))
            made.cache.leave(slot)
            made.cache.release(name)
        if rng.random() < 0.2:
            made.settle()
            assert all(made.holds(name) for name, _ in running if name is not None)
        made.cache.check_integrity()
    assert loads > 20 and made.cache.meters.evictions[ROOM].value > 5
