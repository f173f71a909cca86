"""The shared memory: places, evictions, loads, pins, and the blocks that requests take back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from shapeshift.adapter_cache.lora.batch import LoraHook, shifted
from shapeshift.adapter_cache.lora.segmented import SegmentedAdapters, TorchLora
from shapeshift.adapter_cache.memory.adapter_table import LOADING, READY, Adapter, AdapterTable
from shapeshift.adapter_cache.memory.cache import AdapterCache
from shapeshift.adapter_cache.memory.placement import FOR_ADAPTER, FOR_REQUEST, REMOVED, Reserve, SharedMemory, Span
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo, SchedulerInputs
from shapeshift.adapter_cache.registry.peft import BaseModel, PeftAdapter
from shapeshift.adapter_cache.settings import EVICTION_RULES, SCHEDULERS
from shapeshift.errors import EngineError, OverloadedError
from shapeshift.fused_decode.engine.blocks import BlockPool, Blocks
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch
from shapeshift.serving.metrics import Counter
from tests.adapter_cache.toy_memory import FakeRequest
from tests.recording import recording
from tests.waiting import wait_for

BLOCK_ELEMENTS = 256


def adapter(name: str, elements: int) -> Adapter:
    """A record without a file; its memory is filled with its number."""
    relative = torch.zeros(1, 1, 1, 4, dtype=torch.int64)
    relative[..., 1] = 1
    source = PeftAdapter(Path(name), 1, (), (0, 0), cast(BaseModel, None))
    return Adapter(AdapterInfo(name, 1, elements * 4), name, "", source, relative, elements, verified=True)


class FakeLoads:
    """A cache whose loads wait for `may_load` and fill an adapter's memory with its number."""

    def __init__(self, blocks: int = 4, reserve: int = 512, algorithm: str = "gdsf"):
        self.num_loads = 0
        self.may_load = threading.Event()
        self.may_load.set()
        self.fails: set[str] = set()
        self.unreadable: set[str] = set()
        self.failed: list[tuple[str, str]] = []
        self.changed = threading.Semaphore(0)
        self.memory = torch.zeros(blocks * BLOCK_ELEMENTS + reserve)
        self.pool = BlockPool(blocks)
        self.cache = AdapterCache(
            SharedMemory(self.memory, self.pool, BLOCK_ELEMENTS, text_blocks=1),
            rule=EVICTION_RULES[algorithm],
            load=self._fill,
            on_change=self.changed.release,
            on_failure=lambda one, error: self.failed.append((one.name, str(error))),
        )
        self.adapters: dict[str, Adapter] = {}

    def _fill(self, target: torch.Tensor, adapter: Adapter, *, pause: Callable[[], None]) -> None:
        one = adapter
        self.num_loads += 1
        assert self.may_load.wait(120)
        if one.name in self.fails:
            raise EngineError("gone")
        if one.name in self.unreadable:
            raise OverloadedError("the disk is away")
        target.fill_(one.number)

    def add(self, name: str, elements: int) -> Adapter:
        self.adapters[name] = made = adapter(name, elements)
        self.cache.table.add(made)
        return made

    def load(self, name: str, reserved_tokens: int = 0) -> bool:
        """Load it and wait until it is ready."""
        if not self.cache.start_load(name, reserved_tokens):
            return False
        self.settle()
        return True

    def settle(self) -> None:
        """Wait until no load is in flight."""
        deadline = time.monotonic() + 120
        while any(one.state == LOADING for one in self.adapters.values()) or self.cache.loads:
            assert time.monotonic() < deadline
            self.cache.begin_iteration()
            time.sleep(0.001)
        self.cache.check_integrity()

    def evicted(self, reason: str) -> float:
        """How many adapters were evicted for this reason."""
        counters = [one for one in self.cache.exported if isinstance(one, Counter)]
        return next(one.value for one in counters if one.labels == {"why": reason})

    def holds(self, name: str) -> bool:
        """Whether it is ready and its memory intact."""
        one = self.adapters[name]
        if one.state != READY:
            return False
        span = self.cache.placement.span(name)
        assert (self.memory[span.start : span.end] == one.number).all(), f"{name} was overwritten"
        assert one.places is not None and torch.equal(one.places, shifted(one.relative, span.start))
        return True

    def block(self, name: str) -> int | None:
        """The first block that it has borrowed; None where it is in the reserve."""
        run = self.cache.placement.span(name).run
        return None if run is None else run.start

    def take(self, count: int) -> Blocks:
        """Blocks for a text."""
        found = self.pool.take(count)
        assert found is not None
        return found


@pytest.fixture
def make_cache() -> Iterator[Callable[..., FakeLoads]]:
    made: list[FakeLoads] = []

    def make(**options: int | str) -> FakeLoads:
        made.append(FakeLoads(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.may_load.set()
        one.settle()
        one.cache.close()


# The loader.


def test_the_time_of_a_load_is_in_milliseconds(make_cache: Callable[..., FakeLoads]) -> None:
    made, began = make_cache(), time.monotonic()
    made.may_load.clear()
    made.add("a", 100)
    assert made.cache.start_load("a")
    wait_for(lambda: made.num_loads == 1)
    time.sleep(0.02)
    made.may_load.set()
    made.settle()
    assert 20 <= made.cache.metrics.load_ms.totals()[1] <= (time.monotonic() - began) * 1e3


# The reserve.


def test_gaps_are_found() -> None:
    spans: dict[str, Span] = {}
    reserve = Reserve(200, 400, spans)
    assert reserve.find_gap(200) is None, "the reserve begins at a multiple of the alignment"
    assert reserve.find_gap(176) == Span(224, 176)
    spans |= {"a": Span(224, 40), "b": Span(320, 10)}
    assert reserve.find_gap(32) == Span(288, 32)
    assert reserve.find_gap(33) == Span(352, 33)
    assert reserve.find_gap(49) is None
    reserve.check_integrity()
    assert reserve.find_gap(40, moving="a") == Span(224, 40)
    del spans["a"]
    assert reserve.find_gap(96) == Span(224, 96)
    assert reserve.names == ["b"]


def test_overlaps_are_detected() -> None:
    reserve = Reserve(64, 256, {"a": Span(64, 64), "b": Span(96, 32)})
    with pytest.raises(AssertionError, match="overlaps"):
        reserve.check_integrity()


# The cache.


def test_free_blocks_hold_adapters_when_the_reserve_is_full(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=5)
    for name in "abcd":
        made.add(name, 400 if name == "d" else 250)
        assert made.load(name)
    assert all(map(made.holds, "abcd"))
    assert [made.block(name) for name in "abcd"] == [None, None, 4, 2], "the last run that is long enough"
    assert made.cache.free_tokens == 5 * BLOCK_TOKENS
    text = made.take(3)
    assert text.tolist() == [0, 1, 4] and not made.holds("c") and made.holds("d")
    assert made.evicted(FOR_REQUEST) == 1
    assert made.cache.free_tokens == 2 * BLOCK_TOKENS
    made.pool.release(text)
    made.cache.check_integrity()


def test_an_adapter_in_use_keeps_its_blocks(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=2, reserve=64)
    made.add("a", 200)
    assert made.load("a") and made.block("a") == 1
    assert made.cache.acquire("a")
    assert made.cache.free_tokens == BLOCK_TOKENS and made.pool.take(2) is None
    assert made.cache.acquire(None), "the base model is always resident"
    made.cache.begin_iteration()
    made.add("b", 200)
    assert not made.cache.start_load("b", reserved_tokens=BLOCK_TOKENS), "it would take the memory of a request"
    assert not made.cache.start_load("b"), "one text fits always"
    made.cache.release("a")
    assert made.pool.available == 2


def test_a_request_that_would_get_no_memory_is_not_admitted(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=2, reserve=64)
    made.add("a", 200)
    assert made.load("a")
    text = made.take(1)
    assert not made.cache.acquire("a", BLOCK_TOKENS), "it has the only other block"
    assert made.cache.acquire(None, BLOCK_TOKENS)
    made.pool.release(text)
    assert made.cache.acquire("a", BLOCK_TOKENS)
    made.cache.release("a")


def test_a_pin_does_not_keep_the_blocks_of_texts(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=2, reserve=64)
    one = made.add("a", 200)
    assert made.load("a")
    made.cache.preload.pin([one])
    made.take(2)
    assert not made.holds("a")
    made.pool.release(np.arange(2, dtype=np.int32))


def test_adapters_that_requests_wait_for_stay(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=1, reserve=1024)
    for name in "abc":
        made.add(name, 400)
    assert made.load("a") and made.load("b")
    made.cache.queued("a")
    assert made.load("c")
    assert made.holds("a") and made.holds("c") and not made.holds("b")
    assert made.evicted(FOR_ADAPTER) == 1
    made.cache.unqueued("a")


def test_the_adapter_of_a_waiting_request_is_preloaded(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache()
    made.add("a", 100)
    made.cache.queued("a")
    made.cache.begin_iteration()
    made.settle()
    assert made.holds("a")
    assert made.cache.acquire("a")
    made.cache.unqueued("a")
    assert (made.cache.metrics.misses.value, made.cache.metrics.hits.value) == (1, 0)
    assert made.cache.acquire("a")
    assert (made.cache.metrics.misses.value, made.cache.metrics.hits.value) == (1, 1)
    assert made.cache.metrics.loaded.value == 400


def test_a_prefetch_evicts_nothing(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=1, reserve=256)
    made.add("a", 256), made.add("b", 200), made.add("c", 256)
    assert made.load("a")
    made.cache.preload.prefetch("c")
    made.cache.preload.prefetch("nobody")
    made.cache.begin_iteration()
    made.settle()
    assert made.holds("a") and not made.holds("c")
    made.cache.table.withdraw(made.adapters["a"])
    made.cache.begin_iteration()
    assert made.evicted(REMOVED) == 1
    made.cache.preload.prefetch("c")
    made.cache.begin_iteration()
    made.settle()
    assert made.holds("c")


def test_as_many_adapters_are_loaded_beforehand_as_may_be_at_once(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache()
    pinned = [made.add(name, 40) for name in "abcd"]
    made.may_load.clear()
    made.cache.preload.pin(pinned)
    for loads in (2, 2):
        made.cache.begin_iteration()
        assert [one.state for one in pinned].count(LOADING) == loads
    made.may_load.set()
    made.settle()
    assert all(made.holds(one.name) for one in pinned)


@pytest.mark.parametrize("blocks", [False, True], ids=["reserve", "blocks"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_adapters_of_waiting_requests_do_not_evict_one_another(
    make_cache: Callable[..., FakeLoads], name: str, blocks: bool
) -> None:
    """Beside the adapter in use there is memory for one more, and four requests wait for an adapter each."""
    made = make_cache(blocks=8, reserve=64) if blocks else make_cache(blocks=4, reserve=1664)
    cache = made.cache
    scheduler = SCHEDULERS[name](SchedulerInputs(cache, 10**6, lambda name: 0, BLOCK_TOKENS))
    names = "abcde"
    for one in names:
        made.add(one, 3 * BLOCK_ELEMENTS if blocks else 800)
    requests = [FakeRequest(one, arrived=float(place)) for place, one in enumerate(names)]
    for request in requests:
        scheduler.submit(request)
    admitted: list[FakeRequest] = []
    for running in range(1, len(names) + 1):
        for _ in range(20):
            cache.begin_iteration()
            admitted += scheduler.admit(running - len(admitted))
            made.settle()
        assert len(admitted) == running
        # That of the request that runs, and of the one that comes next.
        assert made.num_loads <= min(running + 1, len(names))
        scheduler.finished(admitted[-1])
    assert admitted == requests
    scheduler.check_integrity()


def test_pins_are_loaded_and_stay(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=2, reserve=512)
    pinned = made.add("p", 100)
    for name in "abcdef":
        made.add(name, 240)
    made.cache.preload.pin([pinned])
    made.cache.begin_iteration()
    made.settle()
    for name in "abcdef":
        assert made.load(name)
        assert made.holds("p") and made.block("p") is None
    made.cache.preload.pin([])
    assert not pinned.pinned


def test_the_reserve_is_compacted_with_adapters_in_use(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=1, reserve=512)
    for name in "abcd":
        made.add(name, 128)
        assert made.load(name)
    assert made.cache.acquire("b")
    made.cache.table.withdraw(made.adapters["a"])
    made.cache.table.withdraw(made.adapters["c"])
    made.cache.begin_iteration()
    # After the evictions, before anything moves.
    version = made.cache.places_of([made.adapters["b"].number])[1]
    made.adapters["big"] = adapter("big", 256)
    made.cache.table.add(made.adapters["big"])
    assert made.load("big")
    assert made.holds("b") and made.holds("d") and made.holds("big")
    assert made.cache.places_of([made.adapters["b"].number])[1] != version
    made.cache.release("b")


def test_an_adapter_that_comes_back_is_read_where_it_lies_now(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=1, reserve=512)
    one, other = made.add("a", 200), made.add("b", 400)
    hook = LoraHook(made.memory, made.cache.places_of, TorchLora())
    row = torch.zeros(1, dtype=torch.int32)
    batch = StepBatch(row.long(), row, row, row + 1, row.long(), row + one.number)

    def places() -> torch.Tensor:
        hook.linear_delta(batch)
        assert isinstance(hook._prepared, SegmentedAdapters)
        return hook._prepared._adapters.places[0]

    assert made.load("a")
    first = places().clone()
    assert one.places is not None and torch.equal(first, one.places)
    assert made.load("b") and not made.holds("a"), "it makes room"
    made.cache.table.withdraw(other)
    made.cache.begin_iteration()
    made.add("c", 100)
    assert made.load("c") and made.load("a")
    assert one.places is not None and not torch.equal(first, one.places), "it lies elsewhere"
    assert torch.equal(places(), one.places)


def test_a_withdrawn_adapter_stays_while_requests_need_it(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache()
    one = made.add("a", 100)
    assert made.load("a")
    assert made.cache.acquire("a")
    made.cache.queued("a")
    made.cache.table.withdraw(one)
    made.cache.begin_iteration()
    assert made.holds("a")
    made.cache.release("a")
    made.cache.begin_iteration()
    assert made.holds("a"), "a request still waits for it"
    made.cache.unqueued("a")
    made.cache.begin_iteration()
    assert made.cache.resident_names() == []
    made.adapters.clear()
    made.cache.check_integrity()


class Interrupted(Adapter):
    """An adapter at whose name another thread withdraws an adapter."""

    interrupt: Callable[[], None] = staticmethod(lambda: None)

    @property
    def name(self) -> str:
        self.interrupt()
        return self.info.name


def test_adapters_may_be_withdrawn_while_unused_ones_are_sought() -> None:
    table, others = AdapterTable(), [adapter(name, 32) for name in "bc"]
    info, relative = others[0].info, others[0].relative
    one = Interrupted(replace(info, name="a"), "a", "", others[0].source, relative, 32, verified=True)
    for each in (one, *others):
        table.add(each)
    table.withdraw(one)
    table.withdraw(others[0])
    changed = threading.Event()

    def withdraw() -> None:
        table.withdraw(others[1])
        changed.set()

    def interrupt() -> None:
        one.interrupt = lambda: None
        threading.Thread(target=withdraw).start()
        # Where the table is locked, the other thread waits.
        changed.wait(0.2)

    one.interrupt = interrupt
    assert table.pop_unused()[:2] == [one, others[0]]
    assert changed.wait(120) and others[1] in table.pop_unused()


def test_an_adapter_that_a_request_names_stays_in_the_table() -> None:
    table, one = AdapterTable(), adapter("a", 32)
    table.add(one)
    assert table.hold(one) and table.hold(one)
    table.withdraw(one)
    table.unhold("a")
    assert table.pop_unused() == []
    table.queued("a")
    table.unhold("a")
    assert table.pop_unused() == [] and table.waiting_adapters() == [one]
    table.unqueued("a")
    assert table.pop_unused() == [one] and table.all() == []
    assert not table.hold(one), "its name has to be looked up again"


def test_a_load_that_fails_leaves_nothing(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache()
    made.add("a", 100)
    made.fails.add("a")
    assert made.load("a")
    assert made.failed == [("a", "gone")]
    assert not made.holds("a") and made.cache.resident_names() == []
    assert made.cache.metrics.failed.value == 1
    made.cache.queued("a")
    made.cache.begin_iteration()
    assert made.cache.resident_names() == [], "it is not tried again and again"
    made.cache.unqueued("a")


def test_reads_that_fail_pause_until_one_succeeds(make_cache: Callable[..., FakeLoads]) -> None:
    """At once, then after one second more each time; a load that succeeds begins anew."""
    made = make_cache()
    one = made.add("a", 100)
    made.unreadable.add("a")
    for pause_s in range(3):
        before = time.monotonic()
        assert one.error is None and made.load("a")
        assert before + pause_s <= one.retry_at <= time.monotonic() + pause_s
        assert pause_s == 0 or (one.error is not None and not made.load("a"))
        # As if it had passed.
        one.retry_at = 0.0
    made.unreadable.clear()
    assert made.load("a") and made.holds("a")
    made.cache.placement.evict(one, REMOVED)
    made.unreadable.add("a")
    assert made.load("a") and one.retry_at <= time.monotonic()


def test_an_adapter_that_does_not_fit_now_is_loaded_later(make_cache: Callable[..., FakeLoads]) -> None:
    made = make_cache(blocks=1, reserve=512)
    made.add("a", 400), made.add("b", 400)
    assert made.load("a")
    assert made.cache.acquire("a")
    assert not made.cache.start_load("b")
    assert made.holds("a")
    made.cache.release("a")
    assert made.load("b")
    assert not made.holds("a")


@pytest.mark.parametrize("algorithm", ["gdsf", "score", "lru", "lfu", "fair"])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_keep_the_memory_intact(
    make_cache: Callable[..., FakeLoads], algorithm: str, seed: int
) -> None:
    rng = random.Random(seed)
    made = make_cache(blocks=5, reserve=700, algorithm=algorithm)
    names = [f"a{number}" for number in range(24)]
    for name in names:
        made.add(name, rng.choice((40, 100, 180, 250, 500)))
    running: list[tuple[str | None, Blocks]] = []
    waiting: list[str] = []
    loads = 0
    for _ in range(400):
        made.cache.begin_iteration()
        for name in [name for name in waiting if made.cache.resident(name)]:
            count = rng.randint(1, 2)
            if made.cache.acquire(name, count * BLOCK_TOKENS):
                waiting.remove(name)
                made.cache.unqueued(name)
                running.append((name, made.take(count)))
        action = rng.random()
        if action < 0.5 and len(waiting) < 8:
            waiting.append(rng.choice(names))
            made.cache.queued(waiting[-1])
        elif action < 0.8 and waiting:
            loads += made.cache.start_load(waiting[0])
        if rng.random() < 0.4 and running:
            ended, blocks = running.pop(rng.randrange(len(running)))
            made.pool.release(blocks)
            made.cache.release(ended)
        if rng.random() < 0.2:
            made.settle()
            assert all(made.holds(name) for name, _ in running if name is not None)
        made.cache.check_integrity()
        made.pool.check_integrity([blocks for _, blocks in running])
    assert loads > 20 and made.evicted(FOR_ADAPTER) > 5


def test_what_is_in_memory_is_recorded_together(tmp_path: Path) -> None:
    made = FakeLoads()
    for name in ("a", "b"):
        made.add(name, 100)
        assert made.cache.start_load(name)
    with recording(tmp_path) as reader:
        made.settle()
    (event,) = [event for event in reader.read() if event.kind == "residents"]
    assert event.values["rows"] == [["a", 400, 0, 0, 0], ["b", 400, 0, 0, 0]]
