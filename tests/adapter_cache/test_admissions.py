"""The orders of admission over a pool that the test drives: who gets in, when, and past whom."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from shapeshift.adapter_cache.gate import Gate
from shapeshift.adapter_cache.multiqueue import FIRST, MultiQueue
from shapeshift.adapter_cache.scheduling import SCHEDULERS, SchedulingSettings, build
from shapeshift.errors import InvalidInputError, OverloadedError
from tests.adapter_cache.memories import Asked, ToyMemory


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(
    scheduler: str, memory: ToyMemory | None = None, clock: Clock | None = None, slot_tokens: int = 1, **own: Any
) -> Gate[Asked]:
    pool = memory or ToyMemory()
    settings = SchedulingSettings(scheduler=scheduler, **own)

    def tokens(name: str | None) -> int:
        return 0 if name is None else pool.sizes[name]

    return build(settings, pool, 10**6, 10**9, tokens, slot_tokens, clock or Clock())


# Of all of them.


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(5))
def test_everyone_is_served_once_and_the_pool_is_never_overdrawn(scheduler: str, seed: int) -> None:
    rng = random.Random(seed)
    sizes = {f"a{number}": rng.choice((10, 20, 40, 80)) for number in range(8)}
    memory, clock = ToyMemory(rng.choice((250, 600)), sizes), Clock()
    gate = made(scheduler, memory, clock, slot_tokens=rng.choice((1, 60)), recluster_s=5.0)
    slots, least = 6, gate._limits.slot_tokens
    running: list[Asked] = []
    served: list[Asked] = []
    submitted: list[Asked] = []
    withdrawn = 0

    def place(one: Asked) -> int:
        return max(least, one.tokens)

    for step in range(2000):
        clock.now += 0.1
        if step < 500 and rng.random() < 0.5:
            answer = rng.randint(1, 20)
            submitted.append(
                Asked(
                    adapter=rng.choice([None, *sizes]),
                    prompt_tokens=rng.randint(1, 40),
                    predicted_tokens=rng.randint(1, 20),
                    max_new_tokens=answer,
                    rank=rng.choice((0, 8, 128)),
                    arrived=clock.now,
                )
            )
            gate.submit(submitted[-1])
            if rng.random() < 0.05:
                assert gate.withdraw(submitted[-1])
                assert not gate.withdraw(submitted.pop())
                withdrawn += 1
        if rng.random() < 0.6:
            memory.arrive()
        for one in gate.squash():
            running.remove(one)
            memory.seated -= place(one)
        for one in gate.admit(slots - len(running)):
            running.append(one)
            memory.seated += place(one)
        assert len(running) <= slots
        assert memory.free_tokens >= 0 or len(running) == 1
        for one in list(running):
            one.generated += 1
            if one.generated == one.max_new_tokens:
                running.remove(one)
                memory.seated -= place(one)
                gate.finished(one)
                served.append(one)
        gate.check_integrity()
        memory.check(running, len(gate))
        if step >= 500 and not running and not len(gate):
            break
    assert len(gate) == 0 and not running
    assert len(served) == len(set(map(id, served))) == len(submitted) > 200
    assert withdrawn > 3


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_limits_and_closing(scheduler: str) -> None:
    gate = build(SchedulingSettings(scheduler=scheduler), ToyMemory(), 2, 50, lambda name: 0)
    waiting = [Asked(max_new_tokens=20, prompt_tokens=10), Asked(prompt_tokens=5, max_new_tokens=5, arrived=1.0)]
    gate.submit(waiting[0])
    with pytest.raises(OverloadedError, match="queue_tokens: 30 tokens wait, 30 more exceed 50"):
        gate.submit(Asked(max_new_tokens=20, prompt_tokens=10))
    gate.submit(waiting[1])
    with pytest.raises(OverloadedError, match="queue_requests: 2 requests wait, at most 2 may"):
        gate.refuse_when_full()
    gate.check_integrity()
    assert gate.close() == waiting and len(gate) == 0
    with pytest.raises(OverloadedError, match="being unloaded"):
        gate.submit(Asked())
    gate.check_integrity()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_request_larger_than_all_memory_runs_alone(scheduler: str) -> None:
    memory = ToyMemory(total_tokens=100)
    gate = made(scheduler, memory)
    giant = Asked(prompt_tokens=500)
    gate.submit(giant)
    assert gate.admit(4) == [giant]
    memory.seated = giant.tokens
    gate.submit(Asked())
    assert gate.admit(3) == []
    gate.finished(giant)
    memory.seated = 0
    assert len(gate.admit(4)) == 1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_many_threads_submit(scheduler: str) -> None:
    gate = made(scheduler, ToyMemory(sizes={"a": 5}, loaded={"a"}))
    got: list[Asked] = []

    def send() -> None:
        for _ in range(100):
            gate.submit(Asked(adapter="a"))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(got) < 400:
        admitted = gate.admit(8)
        got += admitted
        for one in admitted:
            gate.finished(one)
    for thread in threads:
        thread.join()
    gate.check_integrity()
    assert len(set(map(id, got))) == 400


# Orders.


def order_of(gate: Gate[Asked], requests: list[Asked]) -> list[int]:
    """The places in `requests` in order of admission, one slot at a time."""
    for one in requests:
        gate.submit(one)
    got = []
    while len(gate):
        (one,) = gate.admit(1)
        got.append(requests.index(one))
        gate.finished(one)
    return got


def test_first_come_first_served() -> None:
    requests = [Asked(predicted_tokens=tokens) for tokens in (5, 1, 9, 2)]
    assert order_of(made("fifo"), requests) == [0, 1, 2, 3]


def test_the_shortest_answer_first_and_waiting_counts() -> None:
    requests = [Asked(predicted_tokens=tokens, arrived=at) for tokens, at in ((50, 0), (5, 1), (20, 2), (1, 8))]
    assert order_of(made("sjf", ageing=0.0, patience=0.0), requests) == [3, 1, 2, 0]
    assert order_of(made("sjf", ageing=10.0, patience=0.0), requests) == [1, 2, 0, 3]


def test_the_smallest_request_first() -> None:
    shapes = [(100, 100, 128), (1, 1, 8), (50, 50, 8), (50, 50, 128)]
    requests = [Asked(prompt_tokens=a, predicted_tokens=b, rank=rank) for a, b, rank in shapes]
    assert order_of(made("wrs", patience=0.0), requests) == [1, 2, 3, 0]


@pytest.mark.parametrize("scheduler", ["sjf", "wrs"])
def test_nobody_is_passed_without_end(scheduler: str) -> None:
    """A large request among small ones that never cease: its turn comes after as many as the promise says."""
    gate = made(scheduler, ageing=0.0, patience=2.0)
    for _ in range(10):
        gate.submit(Asked(predicted_tokens=1, prompt_tokens=1))
    large = Asked(predicted_tokens=1000, prompt_tokens=1000, rank=128)
    gate.submit(large)
    passed = 0
    while True:
        gate.submit(Asked(predicted_tokens=1, prompt_tokens=1))
        (one,) = gate.admit(1)
        gate.finished(one)
        if one is large:
            break
        passed += 1
    assert passed == 20


def test_who_is_due_stops_the_line_until_there_is_room_for_it() -> None:
    memory = ToyMemory(total_tokens=100)
    gate = made("wrs", memory, patience=1.0)
    small = [Asked(prompt_tokens=20) for _ in range(2)]
    for one in small:
        gate.submit(one)
    assert gate.admit(4) == small
    memory.seated = 60
    large = Asked(prompt_tokens=60, predicted_tokens=100)
    gate.submit(large)
    more = [Asked(prompt_tokens=1, max_new_tokens=1, predicted_tokens=1) for _ in range(5)]
    for one in more:
        gate.submit(one)
    # Two may still pass it, then it is due; there is room for the small ones, but none gets in.
    assert gate.admit(2) == more[:2]
    assert gate.admit(2) == []
    gate.finished(small[0])
    gate.finished(small[1])
    memory.seated = 4
    assert gate.admit(4)[0] is large


# Adapters that are not there.


@pytest.mark.parametrize("scheduler", ["arrival", "chameleon"])
def test_a_loading_adapter_keeps_a_slot_and_nobody_waits_for_it(scheduler: str) -> None:
    memory = ToyMemory(sizes={"a": 10, "b": 10}, loaded={"b"})
    gate = made(scheduler, memory)
    loads, ready, late = Asked("a"), Asked("b"), Asked("b")
    for one in (loads, ready, late):
        gate.submit(one)
    assert gate.admit(2) == [ready], "one of the two slots is kept"
    assert memory.loading == ["a"] and len(gate) == 2
    memory.seated += ready.tokens
    assert gate.admit(1) == []
    memory.arrive()
    assert gate.admit(1) == [loads]
    gate.check_integrity()
    assert gate.withdraw(late) and not gate.withdraw(loads)


def test_adapters_of_the_next_are_loaded_while_no_slot_is_free() -> None:
    memory = ToyMemory(sizes=dict.fromkeys("abc", 10))
    gate = made("arrival", memory)
    for name in "abc":
        gate.submit(Asked(name))
    assert gate.admit(0) == [] and memory.loading == ["a", "b"]
    memory.arrive()
    memory.arrive()
    assert gate.admit(0) == [] and memory.loading == [], "no more than two ahead"


def test_first_come_first_served_waits_for_the_load_and_begins_those_behind_it() -> None:
    memory = ToyMemory(sizes={"a": 10, "b": 10, "c": 10}, loaded={"b"})
    gate = made("fifo", memory)
    requests = [Asked("a"), Asked("b"), Asked("c")]
    for one in requests:
        gate.submit(one)
    assert gate.admit(2) == []
    assert memory.loading == ["a"]
    memory.arrive()
    memory.loaded.add("b")
    assert gate.admit(3) == requests[:2]
    assert memory.loading == ["c"]


def test_who_is_held_may_leave() -> None:
    memory = ToyMemory(sizes={"a": 10})
    gate = made("chameleon", memory)
    held = Asked("a")
    gate.submit(held)
    assert gate.admit(1) == [] and gate.withdraw(held) and len(gate) == 0
    gate.check_integrity()
    assert memory.waiting == {"a": 0}
    other = Asked()
    gate.submit(other)
    assert gate.admit(1) == [other], "its slot is free again"


def test_what_has_been_loaded_is_used_before_another_load_may_evict_it() -> None:
    memory = ToyMemory(total_tokens=60, sizes={"a": 30, "b": 30})
    gate = made("chameleon", memory)
    first, second = Asked("a", prompt_tokens=1, max_new_tokens=1), Asked("b", prompt_tokens=1, max_new_tokens=1)
    gate.submit(first)
    gate.submit(second)
    got: list[Asked] = []
    for _ in range(6):
        got += gate.admit(4 - len(got))
        memory.seated = sum(one.tokens for one in got)
        memory.arrive()
        for one in got[:1]:
            if one.generated == 0:
                one.generated = 1
                gate.finished(one)
    assert got == [first, second]


# Bypass.


def blocked() -> tuple[MultiQueue[Asked], ToyMemory, Clock, Asked]:
    """One request that runs for 20 more iterations of 0.1 s, and a head whose adapter does not fit beside it."""
    memory, clock = ToyMemory(total_tokens=100, sizes={"big": 80, "here": 5}, loaded={"here"}), Clock()
    gate = made("chameleon", memory, clock, patience=0.0)
    assert isinstance(gate, MultiQueue)
    runs = Asked(prompt_tokens=10, max_new_tokens=30, predicted_tokens=30)
    gate.submit(runs)
    assert gate.admit(4) == [runs]
    memory.seated = runs.tokens
    for _ in range(10):
        clock.now += 0.1
        runs.generated += 1
        gate.admit(3)
    gate.submit(Asked("big", arrived=clock.now))
    return gate, memory, clock, runs


def test_who_ends_before_the_head_could_begin_passes_it() -> None:
    gate, memory, clock, _ = blocked()
    short, long = Asked("here", predicted_tokens=10), Asked("here", predicted_tokens=25)
    gate.submit(long)
    gate.submit(short)
    assert gate.admit(3) == [short]
    assert gate.bypasses == 1 and memory.loading == []
    gate.check_integrity()


def test_without_bypass_all_wait_behind_the_head() -> None:
    gate, _, _, _ = blocked()
    gate._bypass = False
    gate.submit(Asked("here", predicted_tokens=1))
    assert gate.admit(3) == []


def test_who_passed_and_does_not_end_in_time_is_set_aside_once() -> None:
    gate, memory, clock, runs = blocked()
    short = Asked("here", predicted_tokens=3, max_new_tokens=10, arrived=clock.now + 1)
    gate.submit(short)
    assert gate.admit(3) == [short]
    memory.seated += short.tokens
    for _ in range(3):
        short.generated += 1
        assert gate.squash() == []
    short.generated += 1
    assert gate.squash() == [short]
    memory.seated -= short.tokens
    gate.check_integrity()
    assert gate.squash() == [] and gate.squashes == 1 and len(gate) == 2
    memory.check([runs], 2)
    assert gate.admit(3) == [], "it does not pass again"
    gate.finished(runs)
    memory.seated = 0
    assert gate.admit(4) == [] and memory.loading == ["big"], "all of the memory is the head's"
    memory.arrive()
    (head,) = gate.admit(4)
    gate.finished(head)
    assert gate.admit(4) == [] and memory.loading == ["here"]
    memory.arrive()
    assert gate.admit(4) == [short]
    gate.check_integrity()


def test_who_passed_goes_on_when_the_head_is_in() -> None:
    gate, memory, clock, runs = blocked()
    short = Asked("here", predicted_tokens=3, max_new_tokens=30, arrived=clock.now + 1)
    gate.submit(short)
    assert gate.admit(3) == [short]
    gate.finished(runs)
    memory.total_tokens, memory.seated = 200, short.tokens
    assert gate.admit(3) == [] and memory.loading == ["big"]
    short.generated = 20
    assert gate.squash() == []


# Queues.


def test_queues_are_made_from_what_came_and_anew_after_a_while() -> None:
    clock, rng = Clock(), random.Random(0)
    gate = made("chameleon", ToyMemory(total_tokens=5000), clock, recluster_s=10.0)
    assert isinstance(gate, MultiQueue)
    assert gate.quotas() == [5000] and gate.queue_lengths() == [0]

    def come(tokens: list[int]) -> None:
        for _ in range(FIRST * 8):
            clock.now += 0.01
            one = Asked(prompt_tokens=rng.choice(tokens), predicted_tokens=5, arrived=clock.now)
            gate.submit(one)
            for each in gate.admit(8):
                gate.finished(each)

    come([10, 1000])
    assert len(gate.quotas()) == 2 and 0 < sum(gate.quotas()) <= 5000
    clock.now += 20
    come([10, 800, 2000])
    clock.now += 20
    gate.admit(1)
    assert len(gate.quotas()) == 3
    gate.check_integrity()


def test_small_requests_have_a_lane_of_their_own() -> None:
    """With a few large ones running and many waiting, a small one that comes gets in at once; first come would not."""
    clock = Clock()
    waited = {}
    for scheduler in ("chameleon", "fifo"):
        memory = ToyMemory(total_tokens=8000)
        gate = made(scheduler, memory, clock, recluster_s=1000.0)
        running: list[Asked] = []
        small: list[int] = []
        rng = random.Random(1)
        ends: dict[Asked, int] = {}
        for step in range(1500):
            clock.now += 0.1
            if rng.random() < 0.085:
                gate.submit(Asked(prompt_tokens=900, max_new_tokens=90, predicted_tokens=90, arrived=clock.now))
            if rng.random() < 0.25:
                gate.submit(Asked(prompt_tokens=20, max_new_tokens=5, predicted_tokens=5, arrived=clock.now))
            for one in gate.admit(100):
                running.append(one)
                memory.seated += one.tokens
                ends[one] = step + one.max_new_tokens
                if one.prompt_tokens == 20 and step > 500:
                    small.append(round((clock.now - one.arrived) * 10))
            for one in [one for one in running if ends[one] <= step]:
                running.remove(one)
                memory.seated -= one.tokens
                gate.finished(one)
        waited[scheduler] = sum(small) / len(small)
    assert waited["chameleon"] < 0.25 * waited["fifo"]


def test_settings_are_checked() -> None:
    for field, value in (("scheduler", "edf"), ("max_queues", 0), ("recluster_s", 0.0), ("patience", -1.0)):
        with pytest.raises(InvalidInputError, match=f"{field}: got"):
            SchedulingSettings(**{field: value})  # type: ignore[arg-type]
