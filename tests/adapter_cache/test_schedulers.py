"""The schedulers over a memory that the test drives: which request is admitted when, and which ones it overtakes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from typing import Any

import pytest

from shapeshift.adapter_cache.front import AdapterRequest
from shapeshift.adapter_cache.policy.admission import AdmissionBase
from shapeshift.adapter_cache.policy.multiqueue import FIRST_CLUSTERING, MAX_QUEUES, MultiQueue
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs
from shapeshift.adapter_cache.settings import SCHEDULERS
from shapeshift.errors import OverloadedError
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.serving.bounds import OVERTAKEN
from shapeshift.serving.metrics import Gauge
from tests.adapter_cache.toy_memory import FakeRequest, ToyMemory
from tests.fused_decode.toy import Run, ToyRuntime, ids, text_of
from tests.sampling import few


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(
    name: str,
    memory: ToyMemory | None = None,
    clock: Clock | None = None,
    block_tokens: int = 1,
    queue_requests: int = 10**6,
    **options: Any,
) -> AdmissionBase[FakeRequest]:
    pool = memory or ToyMemory()

    def tokens(name: str | None) -> int:
        return 0 if name is None else pool.sizes[name]

    classes = ("interactive", "*", "batch")
    inputs = SchedulerInputs(pool, queue_requests, tokens, block_tokens, clock or Clock(), classes)
    scheduler = SCHEDULERS[name](inputs, **options)
    assert isinstance(scheduler, AdmissionBase)
    return scheduler


# All schedulers.


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("seed", few(range(5), (0, 1)))
def test_every_request_is_served_once_and_the_memory_is_never_overcommitted(name: str, seed: int) -> None:
    rng = random.Random(seed)
    sizes = {f"a{number}": rng.choice((10, 20, 40, 80)) for number in range(8)}
    memory, clock = ToyMemory(rng.choice((250, 600)), sizes), Clock()
    slots, least = 6, rng.choice((1, 60))
    options: dict[str, Any] = {"recluster_s": 5.0} if name == "chameleon" else {}
    scheduler = made(name, memory, clock, block_tokens=least, **options)
    # With these a request and the largest adapter have room alone, as the service requires.
    most_rows = 2 if memory.total_tokens == 250 else 4
    running: list[FakeRequest] = []
    served: list[FakeRequest] = []
    submitted: list[FakeRequest] = []
    withdrawn = 0

    def cache_tokens(one: FakeRequest) -> int:
        return one.rows * max(least, one.tokens // one.rows)

    def used() -> int:
        return sum(one.rows for one in running)

    for step in range(2000):
        clock.now += 0.1
        if step < 500 and rng.random() < 0.5:
            answer = rng.randint(1, 20)
            submitted.append(
                FakeRequest(
                    adapter=rng.choice([None, *sizes]),
                    prompt_tokens=rng.randint(1, 40),
                    predicted_tokens=rng.randint(1, 20),
                    max_new_tokens=answer,
                    rank=rng.choice((0, 8, 128)),
                    arrived=clock.now,
                    rows=rng.choice((1, 1, 1, most_rows)),
                    slo_class=rng.choice((None, "interactive", "batch")),
                )
            )
            scheduler.submit(submitted[-1])
            if rng.random() < 0.05:
                assert scheduler.withdraw(submitted[-1])
                assert not scheduler.withdraw(submitted.pop())
                withdrawn += 1
        if rng.random() < 0.6:
            memory.end_load()
        for one in scheduler.squash():
            running.remove(one)
            memory.held_tokens -= cache_tokens(one)
        for one in scheduler.admit(slots - used()):
            running.append(one)
            memory.held_tokens += cache_tokens(one)
        assert used() <= slots
        assert memory.free_tokens >= 0 or len(running) == 1
        for one in list(running):
            one.generated += 1
            if one.generated == one.max_new_tokens:
                running.remove(one)
                memory.held_tokens -= cache_tokens(one)
                scheduler.finished(one)
                served.append(one)
        scheduler.check_integrity()
        memory.check(running, len(scheduler))
        if step >= 500 and not running and not len(scheduler):
            break
    assert len(scheduler) == 0 and not running
    assert len(served) == len(set(map(id, served))) == len(submitted) > 200
    assert withdrawn > 3


@pytest.mark.parametrize("name", SCHEDULERS)
def test_limits_and_closing(name: str) -> None:
    scheduler = SCHEDULERS[name](SchedulerInputs(ToyMemory(), 2, lambda name: 0))
    waiting = [
        FakeRequest(max_new_tokens=20, prompt_tokens=10),
        FakeRequest(prompt_tokens=5, max_new_tokens=5, arrived=1.0),
    ]
    scheduler.submit(waiting[0])
    scheduler.submit(waiting[1])
    with pytest.raises(OverloadedError, match="queue_requests: 2 requests wait, 1 more would exceed 2"):
        scheduler.refuse_when_full()
    scheduler.check_integrity()
    assert scheduler.close() == waiting and len(scheduler) == 0
    with pytest.raises(OverloadedError, match="being unloaded"):
        scheduler.submit(FakeRequest())
    scheduler.check_integrity()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_request_larger_than_all_memory_runs_alone(name: str) -> None:
    memory = ToyMemory(total_tokens=100)
    scheduler = made(name, memory)
    giant = FakeRequest(prompt_tokens=500)
    scheduler.submit(giant)
    assert scheduler.admit(4) == [giant]
    memory.held_tokens = giant.tokens
    scheduler.submit(FakeRequest())
    assert scheduler.admit(3) == []
    scheduler.finished(giant)
    memory.held_tokens = 0
    assert len(scheduler.admit(4)) == 1


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_reserved_request_larger_than_all_memory_runs_alone(name: str) -> None:
    memory = ToyMemory(total_tokens=100, sizes={"a": 10}, loading=["a"])
    scheduler = made(name, memory)
    giant = FakeRequest("a", prompt_tokens=500)
    scheduler.submit(giant)
    assert scheduler.admit(4) == []
    memory.end_load()
    assert scheduler.admit(4) == [giant], "what waits for its adapter is no company of its own"
    scheduler.check_integrity()


class MemoryOfTexts(ToyMemory):
    """Has the blocks of a pool, and no adapters."""

    pool: BlockPool

    @property
    def free_tokens(self) -> int:
        return self.pool.available * BLOCK_TOKENS


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_running_requests_share_is_counted_once(name: str) -> None:
    """Six texts of three blocks, of which they share two, in a cache of nine: as many fit as without adapters."""
    memory, prefix = MemoryOfTexts(), "the same beginning of every prompt"
    run = Run(ToyRuntime(slots=6, blocks=9), caching=True, admission=made(name, memory, block_tokens=BLOCK_TOKENS))
    memory.pool, run.request_type = run.loop.slots.pool, AdapterRequest
    requests = [run.submit(prefix + letter, max_tokens=9) for letter in "abcdef"]
    for _ in range(3):
        run.loop.step()
    assert all(request.slot is not None for request in requests)
    run.until_idle()
    assert [text_of(one) for one in requests] == [run.runtime.text(ids(prefix + letter), 9) for letter in "abcdef"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_many_threads_submit(name: str) -> None:
    scheduler = made(name, ToyMemory(sizes={"a": 5}, loaded={"a"}))
    got: list[FakeRequest] = []

    def send() -> None:
        for _ in range(100):
            scheduler.submit(FakeRequest(adapter="a"))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(got) < 400:
        admitted = scheduler.admit(8)
        got += admitted
        for one in admitted:
            scheduler.finished(one)
    for thread in threads:
        thread.join()
    scheduler.check_integrity()
    assert len(set(map(id, got))) == 400


# Orders.


def order_of(scheduler: AdmissionBase[FakeRequest], requests: list[FakeRequest]) -> list[int]:
    """Indices into `requests` in order of admission, one slot at a time."""
    for one in requests:
        scheduler.submit(one)
    got = []
    while len(scheduler):
        (one,) = scheduler.admit(1)
        got.append(requests.index(one))
        scheduler.finished(one)
    return got


def test_first_come_first_served() -> None:
    requests = [FakeRequest(predicted_tokens=tokens) for tokens in (5, 1, 9, 2)]
    assert order_of(made("fifo"), requests) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["arrival", "fifo"])
def test_urgent_classes_are_first_and_overtaking_is_bounded(name: str) -> None:
    classes = ["batch", None, *["interactive"] * (OVERTAKEN + 1)]
    requests = [FakeRequest(slo_class=slo_class) for slo_class in classes]
    urgent = list(range(2, len(classes)))
    assert order_of(made(name), requests) == [*urgent[:-1], 0, 1, urgent[-1]]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_urgent_requests_wait_shorter_than_a_burst_that_came_before(name: str) -> None:
    requests = [FakeRequest(slo_class=slo_class) for slo_class in (*["batch"] * 20, *["interactive"] * 10)]
    order = order_of(made(name), requests)
    assert sorted(order.index(place) for place in range(20, 30))[-1] < 20
    assert [place for place in order if place < 20] == list(range(20))


def test_urgent_requests_that_are_withdrawn_have_overtaken_nobody() -> None:
    scheduler = made("chameleon", patience=0.0)
    scheduler.submit(FakeRequest(slo_class="batch"))
    for _ in range(OVERTAKEN):
        scheduler.submit(gone := FakeRequest(slo_class="interactive"))
        assert scheduler.withdraw(gone)
    scheduler.submit(urgent := FakeRequest(slo_class="interactive"))
    assert scheduler.admit(1) == [urgent]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_squashed_request_whose_place_is_taken_may_end_with_the_step_in_flight(name: str) -> None:
    scheduler = made(name, queue_requests=1)
    first, urgent = FakeRequest(slo_class="batch"), FakeRequest(slo_class="interactive")
    scheduler.submit(first)
    assert scheduler.admit(1) == [first]
    scheduler.preempted(first)
    assert scheduler.submit(urgent) is first and not scheduler.withdraw(first)
    scheduler.finished(first)
    scheduler.check_integrity()


def test_the_adapters_of_urgent_requests_are_loaded_first() -> None:
    memory = ToyMemory(sizes=dict.fromkeys("abc", 10))
    scheduler = made("arrival", memory)
    for name, own in (("a", None), ("b", None), ("c", "interactive")):
        scheduler.submit(FakeRequest(name, slo_class=own))
    assert scheduler.admit(0) == [] and memory.loading == ["c", "a"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_beams_take_a_slot_each(name: str) -> None:
    memory = ToyMemory(sizes={"a": 10})
    scheduler = made(name, memory)
    beams, one = FakeRequest("a", rows=3), FakeRequest()
    scheduler.submit(beams)
    assert scheduler.admit(2) == [] and len(scheduler) == 1
    memory.end_load()
    assert scheduler.admit(2) == [], "two slots are too few for three beams"
    admitted = scheduler.admit(3)
    memory.end_load()
    assert [*admitted, *scheduler.admit(3)] == [beams]
    scheduler.submit(one)
    assert scheduler.admit(0) == []
    scheduler.finished(beams)
    assert scheduler.admit(3) == [one]
    scheduler.check_integrity()


def test_the_shortest_answer_is_first_and_waiting_counts() -> None:
    requests = [FakeRequest(predicted_tokens=tokens, arrived=at) for tokens, at in ((50, 0), (5, 1), (20, 2), (1, 8))]
    assert order_of(made("sjf", patience=0.0), requests) == [1, 2, 0, 3]
    for one in requests:
        one.arrived = 0.0
    assert order_of(made("sjf", patience=0.0), requests) == [3, 1, 2, 0]


def test_the_smallest_request_is_first() -> None:
    shapes = [(100, 100, 128), (1, 1, 8), (50, 50, 8), (50, 50, 128)]
    requests = [FakeRequest(prompt_tokens=a, predicted_tokens=b, rank=rank) for a, b, rank in shapes]
    assert order_of(made("wrs", patience=0.0), requests) == [1, 2, 3, 0]


@pytest.mark.parametrize("name", ["sjf", "wrs"])
def test_overtaking_is_bounded(name: str) -> None:
    """A large request among endless small ones is admitted after as many as the bound allows."""
    scheduler = made(name, patience=2.0)
    for _ in range(10):
        scheduler.submit(FakeRequest(predicted_tokens=1, prompt_tokens=1))
    large = FakeRequest(predicted_tokens=1000, prompt_tokens=1000, rank=128)
    scheduler.submit(large)
    overtaken = 0
    while True:
        scheduler.submit(FakeRequest(predicted_tokens=1, prompt_tokens=1))
        (one,) = scheduler.admit(1)
        scheduler.finished(one)
        if one is large:
            break
        overtaken += 1
    assert overtaken == 20


def test_a_due_request_blocks_the_others_until_it_fits() -> None:
    memory = ToyMemory(total_tokens=100)
    scheduler = made("wrs", memory, patience=1.0)
    small = [FakeRequest(prompt_tokens=20) for _ in range(2)]
    for one in small:
        scheduler.submit(one)
    assert scheduler.admit(4) == small
    memory.held_tokens = 60
    large = FakeRequest(prompt_tokens=60, predicted_tokens=100)
    scheduler.submit(large)
    more = [FakeRequest(prompt_tokens=1, max_new_tokens=1, predicted_tokens=1) for _ in range(5)]
    for one in more:
        scheduler.submit(one)
    # Two more may overtake it, then it is due; the small ones would fit, but none is admitted.
    assert scheduler.admit(2) == more[:2]
    assert scheduler.admit(2) == []
    scheduler.finished(small[0])
    scheduler.finished(small[1])
    memory.held_tokens = 4
    assert scheduler.admit(4)[0] is large


# Adapters that are not resident.


@pytest.mark.parametrize("name", ["arrival", "chameleon"])
def test_a_loading_adapter_reserves_a_slot_and_blocks_no_other_request(name: str) -> None:
    memory = ToyMemory(sizes={"a": 10, "b": 10}, loaded={"b"})
    scheduler = made(name, memory)
    loads, ready, late = FakeRequest("a"), FakeRequest("b"), FakeRequest("b")
    for one in (loads, ready, late):
        scheduler.submit(one)
    assert scheduler.admit(2) == [ready], "one of the two slots is reserved"
    assert memory.loading == ["a"] and len(scheduler) == 2
    memory.held_tokens += ready.tokens
    assert scheduler.admit(1) == []
    memory.end_load()
    assert scheduler.admit(1) == [loads]
    scheduler.check_integrity()
    assert scheduler.withdraw(late) and not scheduler.withdraw(loads)


def test_the_next_adapters_are_loaded_while_no_slot_is_free() -> None:
    memory = ToyMemory(sizes=dict.fromkeys("abc", 10))
    scheduler = made("arrival", memory)
    for name in "abc":
        scheduler.submit(FakeRequest(name))
    assert scheduler.admit(0) == [] and memory.loading == ["a", "b"]
    memory.end_load()
    memory.end_load()
    assert scheduler.admit(0) == [] and memory.loading == [], "at most two are preloaded"


def test_fifo_waits_for_the_load_and_preloads_the_adapters_behind_it() -> None:
    memory = ToyMemory(sizes={"a": 10, "b": 10, "c": 10}, loaded={"b"})
    scheduler = made("fifo", memory)
    requests = [FakeRequest("a"), FakeRequest("b"), FakeRequest("c")]
    for one in requests:
        scheduler.submit(one)
    assert scheduler.admit(2) == []
    assert memory.loading == ["a"]
    memory.end_load()
    memory.loaded.add("b")
    assert scheduler.admit(3) == requests[:2]
    assert memory.loading == ["c"]


def test_a_reserved_request_can_be_withdrawn() -> None:
    memory = ToyMemory(sizes={"a": 10})
    scheduler = made("chameleon", memory)
    reserved = FakeRequest("a")
    scheduler.submit(reserved)
    assert scheduler.admit(1) == [] and scheduler.withdraw(reserved) and len(scheduler) == 0
    scheduler.check_integrity()
    assert memory.waiting == {"a": 0}
    other = FakeRequest()
    scheduler.submit(other)
    assert scheduler.admit(1) == [other], "its slot is free again"


def test_a_loaded_adapter_is_used_before_another_load_may_evict_it() -> None:
    memory = ToyMemory(total_tokens=60, sizes={"a": 30, "b": 30})
    scheduler = made("chameleon", memory)
    first, second = (
        FakeRequest("a", prompt_tokens=1, max_new_tokens=1),
        FakeRequest("b", prompt_tokens=1, max_new_tokens=1),
    )
    scheduler.submit(first)
    scheduler.submit(second)
    got: list[FakeRequest] = []
    for _ in range(6):
        got += scheduler.admit(4 - len(got))
        memory.held_tokens = sum(one.tokens for one in got)
        memory.end_load()
        for one in got[:1]:
            if one.generated == 0:
                one.generated = 1
                scheduler.finished(one)
    assert got == [first, second]


# Bypass.


def blocked(bypass: bool = True) -> tuple[MultiQueue[FakeRequest], ToyMemory, Clock, FakeRequest]:
    """One request that runs for 20 more iterations of 0.1 s, and a head whose adapter does not fit beside it."""
    memory, clock = ToyMemory(total_tokens=100, sizes={"big": 80, "here": 5}, loaded={"here"}), Clock()
    scheduler = made("chameleon", memory, clock, patience=0.0, bypass=bypass)
    assert isinstance(scheduler, MultiQueue)
    runs = FakeRequest(prompt_tokens=10, max_new_tokens=30, predicted_tokens=30)
    scheduler.submit(runs)
    assert scheduler.admit(4) == [runs]
    memory.held_tokens = runs.tokens
    for _ in range(10):
        clock.now += 0.1
        runs.generated += 1
        scheduler.admit(3)
    scheduler.submit(FakeRequest("big", arrived=clock.now))
    return scheduler, memory, clock, runs


def test_a_request_that_ends_before_the_head_can_start_overtakes_it() -> None:
    scheduler, memory, clock, _ = blocked()
    short, long = (FakeRequest("here", predicted_tokens=tokens, arrived=clock.now) for tokens in (10, 25))
    scheduler.submit(long)
    scheduler.submit(short)
    assert scheduler.admit(3) == [short]
    assert scheduler.bypasses == 1 and memory.loading == []
    scheduler.check_integrity()


def test_without_bypass_all_requests_wait_behind_the_head() -> None:
    scheduler, _, clock, _ = blocked(bypass=False)
    scheduler.submit(FakeRequest("here", predicted_tokens=1, arrived=clock.now))
    assert scheduler.admit(3) == []


def test_a_request_that_overtook_and_runs_late_is_squashed_once() -> None:
    scheduler, memory, clock, runs = blocked()
    short = FakeRequest("here", predicted_tokens=3, max_new_tokens=10, arrived=clock.now + 1)
    scheduler.submit(short)
    assert scheduler.admit(3) == [short]
    memory.held_tokens += short.tokens
    for _ in range(3):
        short.generated += 1
        assert scheduler.squash() == []
    short.generated += 1
    assert scheduler.squash() == [short]
    memory.held_tokens -= short.tokens
    scheduler.check_integrity()
    assert scheduler.squash() == [] and scheduler.squashes == 1 and len(scheduler) == 2
    memory.check([runs], 2)
    assert scheduler.admit(3) == [], "it does not overtake again"
    scheduler.finished(runs)
    memory.held_tokens = 0
    assert scheduler.admit(4) == [] and memory.loading == ["big"], "all of the memory is the head's"
    memory.end_load()
    (head,) = scheduler.admit(4)
    scheduler.finished(head)
    assert scheduler.admit(4) == [] and memory.loading == ["here"]
    memory.end_load()
    assert scheduler.admit(4) == [short]
    scheduler.check_integrity()


def test_a_request_that_overtook_continues_once_the_head_is_admitted() -> None:
    scheduler, memory, clock, runs = blocked()
    short = FakeRequest("here", predicted_tokens=3, max_new_tokens=30, arrived=clock.now + 1)
    scheduler.submit(short)
    assert scheduler.admit(3) == [short]
    scheduler.finished(runs)
    memory.total_tokens, memory.held_tokens = 200, short.tokens
    assert scheduler.admit(3) == [] and memory.loading == ["big"]
    short.generated = 20
    assert scheduler.squash() == []


# Queues.


def test_queues_are_built_from_recent_requests_and_rebuilt() -> None:
    clock, rng = Clock(), random.Random(0)
    scheduler = made("chameleon", ToyMemory(total_tokens=5000), clock, recluster_s=10.0)
    assert isinstance(scheduler, MultiQueue)
    assert scheduler.quotas == [5000]

    def arrive(tokens: list[int]) -> None:
        for _ in range(FIRST_CLUSTERING * 8):
            clock.now += 0.01
            one = FakeRequest(prompt_tokens=rng.choice(tokens), predicted_tokens=5, arrived=clock.now)
            scheduler.submit(one)
            for each in scheduler.admit(8):
                scheduler.finished(each)

    arrive([10, 1000])
    assert len(scheduler.quotas) == 2 and 0 < sum(scheduler.quotas) <= 5000
    clock.now += 20
    arrive([10, 800, 2000])
    clock.now += 20
    scheduler.admit(1)
    assert len(scheduler.quotas) == 3
    scheduler.check_integrity()


def test_large_requests_do_not_delay_small_ones() -> None:
    """While large requests run and wait, a small one is admitted at once; in order of arrival it would wait."""
    clock = Clock()
    waited = {}
    for name in ("chameleon", "fifo"):
        memory = ToyMemory(total_tokens=8000)
        options: dict[str, Any] = {"recluster_s": 1000.0} if name == "chameleon" else {}
        scheduler = made(name, memory, clock, **options)
        running: list[FakeRequest] = []
        small: list[int] = []
        rng = random.Random(1)
        ends: dict[FakeRequest, int] = {}
        for step in range(1500):
            clock.now += 0.1
            if rng.random() < 0.085:
                scheduler.submit(
                    FakeRequest(prompt_tokens=900, max_new_tokens=90, predicted_tokens=90, arrived=clock.now)
                )
            if rng.random() < 0.25:
                scheduler.submit(FakeRequest(prompt_tokens=20, max_new_tokens=5, predicted_tokens=5, arrived=clock.now))
            for one in scheduler.admit(100):
                running.append(one)
                memory.held_tokens += one.tokens
                ends[one] = step + one.max_new_tokens
                if one.prompt_tokens == 20 and step > 500:
                    small.append(round((clock.now - one.arrived) * 10))
            for one in [one for one in running if ends[one] <= step]:
                running.remove(one)
                memory.held_tokens -= one.tokens
                scheduler.finished(one)
        waited[name] = sum(small) / len(small)
    assert waited["chameleon"] < 0.25 * waited["fifo"]


def test_only_the_chosen_scheduler_is_imported() -> None:
    lines = (
        "import sys, shapeshift.adapter_cache.front",
        "from shapeshift.adapter_cache.settings import SCHEDULERS",
        "SCHEDULERS['arrival']",
        "print(*sorted(name for name in sys.modules if name.startswith('shapeshift.adapter_cache.policy.')))",
    )
    found = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True)
    modules = {name.rpartition(".")[2] for name in found.stdout.split()}
    assert modules == {"scheduling", "admission", "eviction", "length_prediction"}


def test_every_queue_has_its_gauges_also_while_there_are_fewer() -> None:
    scheduler, *_ = blocked()
    read = {(one.name, one.labels["queue"]): one.read() for one in scheduler.metrics() if isinstance(one, Gauge)}
    waiting, quota = "shapeshift_adapter_queue_requests", "shapeshift_adapter_queue_quota_tokens"
    first = {(waiting, "0"): 1, (quota, "0"): 100}
    assert read == {**{(name, str(queue)): 0 for name in (waiting, quota) for queue in range(MAX_QUEUES)}, **first}
