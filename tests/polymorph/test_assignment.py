"""What waits for which worker, held against a plain account of it under random events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from shapeshift.engines.execution.request import Row, TextRequest
from shapeshift.polymorph.policy.baselines.binpacking import Packer
from shapeshift.polymorph.policy.dispatch import Rules
from shapeshift.polymorph.policy.dispatcher import Dispatcher
from shapeshift.polymorph.router.assignment import Assignment, DispatchedQueues, SharedQueue
from shapeshift.serving.bounds import SloClasses

EDGES = [16, 64, 512]
CLASSES = ("interactive", "*", "batch")


def row(tokens: int) -> Row:
    return TextRequest([np.ones(tokens, np.int64)], lambda request: None).rows[0]


def limits(edge: int) -> tuple[int, int]:
    return edge or 100, 4


def row_cost(edge: int, tokens: int) -> float:
    return float(edge or tokens)


def shared() -> SharedQueue:
    return SharedQueue(limits, row_cost, SloClasses(CLASSES))


def dispatched(algorithm: str = "earliest_finish") -> DispatchedQueues:
    return DispatchedQueues(
        Dispatcher(EDGES, [1.0, 2.0, 4.0], Rules(algorithm)),
        EDGES,
        [8.0, 4.0, 2.0],
        limits,
        row_cost,
        SloClasses(CLASSES),
    )


def packed() -> DispatchedQueues:
    return DispatchedQueues(Packer(EDGES), EDGES, [8.0, 4.0, 2.0], limits, row_cost, SloClasses(CLASSES))


@pytest.mark.parametrize("make", [dispatched, packed])
def test_the_predicted_wait_is_that_of_the_worker_that_would_get_the_row(make: Callable[[], DispatchedQueues]) -> None:
    queue = make()
    for number in range(300):
        queue.add(f"{number:03}", EDGES[number % 3])
    for _ in range(450):
        queue.put(row(10))
    looked: list[str] = []

    def in_flight(worker: str) -> float:
        looked.append(worker)
        return 0.0

    wait_ms = queue.wait_ms(60, in_flight)
    assert wait_ms == min(queue.outstanding(name) * float(EDGES[int(name) % 3]) for name in looked)
    assert {int(name) % 3 for name in looked} == {1, 2}
    if make is dispatched:
        assert len(looked) == 2, "one of each bin, however many workers there are"


# One queue for all.


def test_without_a_worker_a_row_does_not_wait() -> None:
    for assignment in (shared(), dispatched()):
        assert assignment.put(row(5)) is None and assignment.waiting() == [] and assignment.more() is None


def test_an_idle_worker_is_chosen_before_a_busy_one() -> None:
    queue = shared()
    assert queue.add("a", 0) and queue.add("b", 0)
    first, second, third = (row(100) for _ in range(3))
    woken = str(queue.put(first))
    assert queue.take(woken) == [first]
    other = str(queue.put(second))
    assert other != woken and queue.take(woken) == []
    assert queue.take(other) == [second]
    # With all busy the next one waits in a worker.
    assert queue.put(third) in ("a", "b") and queue.take(woken) == [third]
    assert (queue.outstanding(woken), queue.outstanding(other)) == (2, 1)
    queue.done(woken, 1)
    queue.done(woken, 1)
    assert queue.outstanding(woken) == 0


def test_a_call_takes_a_fair_share_that_packs_well() -> None:
    queue = shared()
    for name in "ab":
        queue.add(name, 0)
    rows = [row(tokens) for tokens in (30, 30, 30, 30, 90, 20)]
    for one in rows:
        queue.put(one)
    assert queue.take("a") == rows[:3]
    assert queue.more() == "b" and queue.take("b") == rows[3:4]
    assert queue.take("b") == rows[4:5] and queue.waiting() == rows[5:]


def test_the_last_worker_returns_its_rows() -> None:
    queue = shared()
    queue.add("a", 0)
    queue.add("b", 0)
    rows = [row(1), row(2)]
    for one in rows:
        queue.put(one)
    assert queue.remove("a") == [] and queue.more() == "b"
    assert queue.remove("b") == rows and queue.waiting() == [] and queue.more() is None


# A queue for each.


def test_every_worker_gets_texts_that_fit() -> None:
    queues = dispatched()
    for name, edge in zip("abc", EDGES, strict=True):
        assert queues.add(name, edge)
    assert [queues.put(row(tokens)) for tokens in (16, 64, 65)] == ["a", "b", "c"]
    assert [len(queues.take(name)) for name in "abc"] == [1, 1, 1]
    assert [queues.outstanding(name) for name in "abc"] == [1, 1, 1]
    queues.remove("c")
    assert queues.put(row(65)) is None


def test_a_worker_with_all_engines_serves_the_last_bin_and_an_unknown_bin_the_next_shorter() -> None:
    queues = dispatched()
    assert queues.add("all", 0) and queues.add("odd", 48) and not queues.add("tiny", 15)
    assert queues.put(row(500)) == "all"
    assert queues.put(row(17)) == "all" and queues.put(row(16)) == "odd"
    for _ in range(3):
        queues.put(row(16))
    # As many tokens as the bin that it stands for.
    assert len(queues.take("odd")) == 1


def test_a_static_engine_is_filled_and_not_more() -> None:
    queues = dispatched()
    queues.add("b", 64)
    rows = [row(tokens) for tokens in (30, 30, 30, 2, 2, 2, 2, 2)]
    for one in rows:
        queues.put(one)
    assert [queues.take("b") for _ in range(4)] == [rows[:2], rows[2:6], rows[6:], []]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["shared", "earliest_finish", "multilevel", "intra_group", "bin_packing"])
def test_nothing_is_lost_and_counts_add_up(kind: str, seed: int) -> None:
    """Workers come, go and come back with another bin while rows come, run and are done."""
    queues: Assignment
    queues = shared() if kind == "shared" else packed() if kind == "bin_packing" else dispatched(kind)
    rng = random.Random(seed)
    bins: dict[str, int] = {}
    waiting: set[Row] = set()
    running: dict[str, list[list[Row]]] = {}
    for _ in range(3000):
        name = rng.choice("abcdef")
        event = rng.random()
        if name in bins and rng.random() < 0.1:
            queues.delayed(name, rng.choice([0.0, 1.0, 30.0, 300.0]))
        if name not in bins:
            if event < 0.2:
                bins[name] = 0 if kind == "shared" else rng.choice([0, *EDGES])
                assert queues.add(name, bins[name])
                running[name] = []
        elif event < 0.04:
            left = queues.remove(name)
            assert len(set(left)) == len(left) and set(left) <= waiting
            waiting -= set(left)
            del bins[name], running[name]
        elif event < 0.4:
            one = row(rng.choice((1, 10, 16, 17, 64, 65, 200, 512)))
            woken = queues.put(one)
            able = [own for own, edge in bins.items() if (edge or 512) >= one.tokens]
            assert (woken in able) if able else woken is None
            if woken is not None:
                waiting.add(one)
        elif event < 0.7:
            taken = queues.take(name)
            assert set(taken) <= waiting and sum(one.tokens for one in taken[1:]) <= (bins[name] or 512)
            assert all(one.tokens <= (bins[name] or 512) for one in taken)
            waiting -= set(taken)
            running[name] += [taken] if taken else []
        elif running[name]:
            queues.done(name, len(running[name].pop(rng.randrange(len(running[name])))))
        assert Counter(queues.waiting()) == Counter(waiting)
        for own in bins:
            assert queues.outstanding(own) >= sum(map(len, running[own]))
        queued = 0 if kind == "shared" else len(waiting)
        assert sum(map(queues.outstanding, bins)) == queued + sum(len(one) for own in running.values() for one in own)
    assert isinstance(queues, SharedQueue | DispatchedQueues)
    if isinstance(queues, DispatchedQueues) and isinstance(queues.dispatcher, Dispatcher):
        queues.dispatcher.check_integrity()
        for own in bins:
            assert queues.dispatcher.remove(own) == queues.outstanding(own) + queues._foreign[own]


def test_a_packer_counts_as_a_dispatcher_does() -> None:
    packer: Packer[str] = Packer(EDGES)
    packer.add(0, "a", 2.0)
    packer.add(0, "b", 2.0, outstanding=1)
    packer.add(2, "c", 1.0)
    # The fullest with room first, the least full where none has any.
    assert [packer.dispatch(5) for _ in range(4)] == [(0, "b"), (0, "a"), (0, "a"), (2, "c")]
    packer.finish("b")
    assert packer.dispatch(5) == (0, "b") and packer.dispatch(100) == (2, "c")
    assert packer.remove("c") == 2 and packer.dispatch(100) is None
    with pytest.raises(KeyError):
        packer.finish("c")
    with pytest.raises(KeyError):
        packer.remove("c")


# Workers that are reached late.


def test_a_worker_that_is_reached_late_gets_what_would_wait_longer_for_the_others() -> None:
    queue = shared()
    for name in ("near", "far"):
        queue.add(name, 0)
        queue.delayed(name, 0.0)
    queue.delayed("far", 100.0)
    first, second = row(50), row(100)
    assert queue.put(first) == "near" and queue.take("far") == [] and queue.take("near") == [first]
    # 150 ms of work for two workers: 75 ms are shorter than the way.
    assert queue.put(second) == "near" and queue.take("far") == [] and queue.take("near") == [second]
    third = row(100)
    assert queue.put(third) == "far" and queue.take("near") == [] and queue.take("far") == [third]
    for name, rows in (("near", 1), ("near", 1), ("far", 1)):
        queue.done(name, rows)
    queue.delayed("far", 0.0)
    assert queue.put(row(50)) in ("near", "far")
    assert sum(queue._busy_ms.values()) == 0


def test_of_idle_workers_the_one_that_is_reached_first_is_chosen() -> None:
    queue = shared()
    for name, delay_ms in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        queue.add(name, 0)
        queue.delayed(name, delay_ms)
    assert queue.put(row(100)) == "b"


@pytest.mark.parametrize("make", [dispatched, packed])
def test_what_comes_before_a_row_counts_as_rows_that_wait(make: Callable[[], DispatchedQueues]) -> None:
    queues = make()
    for name in ("a", "b"):
        assert queues.add(name, 64)
    queues.delayed("a", 1000.0)
    queues.delayed("b", 1000.0)
    queues.delayed("a", 64.0 * 7.5 + 1000.0)
    rows = [row(60) for _ in range(7)]
    # Bin packing fills the fuller one as long as it has capacity.
    assert {queues.put(one) for one in rows} == {"b"}
    queues.delayed("a", 1000.0)
    assert queues.put(row(60)) == "a"
    taken = [queues.take("b") for _ in rows]
    for pack in taken:
        queues.done("b", len(pack))
    assert queues.outstanding("a") == 1 and queues.outstanding("b") == 0
