"""The router over workers that hang, die, leave, fail and change: no text is lost, none is answered twice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.engines.interfaces import Ids
from shapeshift.errors import EngineError, ModelDiedError, OverloadedError
from shapeshift.polymorph.router.membership import DEAD_AFTER

if TYPE_CHECKING:
    from tests.polymorph.conftest import Asked, FakeWorker, Router

MakeRouter = Callable[..., "Router"]


def retries(router: Router) -> float:
    """What `shapeshift_retries_total` says."""
    return {metric.name: metric for metric in router.metrics()}["shapeshift_retries_total"].value  # type: ignore[union-attr]


def test_a_text_that_makes_every_worker_hang_fails(make_router: MakeRouter) -> None:
    router = make_router(0, 0, timeout_s=0.1)
    free = threading.Event()
    tries: list[int] = []

    def hang(texts: Sequence[Ids]) -> None:
        if any(len(ids) == 77 for ids in texts):
            tries.append(77)
            assert free.wait(120)

    for worker in router.workers.values():
        worker.before = hang
    error = router.ask(77).error()
    assert isinstance(error, OverloadedError) and "no answer in time" in str(error)
    assert len(tries) == 5
    assert router.ask(100).error() is None
    free.set()
    router.wait(lambda: router.joined("a", "b"))
    router.check_rest()


@pytest.mark.parametrize("bins", [(0, 0), (512, 512)])
def test_a_worker_that_hangs_leaves_and_its_texts_go_elsewhere(make_router: MakeRouter, bins: tuple[int, ...]) -> None:
    router = make_router(*bins, timeout_s=0.2)
    hung = router.workers["a"]
    hung.stick()
    asked = [router.ask(100, 100) for _ in range(10)]
    assert [one.error() for one in asked] == [None] * 10
    assert hung.texts == []
    router.wait(lambda: router.timeouts("a") >= DEAD_AFTER)
    router.wait(lambda: not router.members.workers["a"].joined)
    # The other worker serves meanwhile.
    assert router.ask(100).error() is None
    hung.free()
    router.wait(lambda: router.joined("a", "b"))
    router.wait(lambda: router.timeouts("a") == 0)
    assert [router.ask(100).error() for _ in range(10)] == [None] * 10
    router.check_rest()


def test_a_worker_that_never_returns_costs_a_bounded_number_of_threads(make_router: MakeRouter) -> None:
    router = make_router(0, 0, timeout_s=0.02, max_abandoned=3)
    stuck = router.workers["a"]
    stuck.stick()
    router.wait(lambda: router.transport.pool.abandoned("a") == 3)
    held = stuck.held
    assert [router.ask(100).error() for _ in range(5)] == [None] * 5
    time.sleep(0.2)
    assert router.transport.pool.abandoned("a") == 3 and stuck.held == held
    stuck.free()
    router.wait(lambda: router.joined("a", "b"))
    router.check_rest()


def test_the_first_answer_counts_however_late(make_router: MakeRouter) -> None:
    router = make_router(0, timeout_s=0.1)
    router.check_rest()
    slow = router.workers["a"]
    slow.stick()
    asked = router.ask(100)
    router.wait(lambda: router.joined() and router.waiting == 1)
    slow.ready = False
    # Every call that it holds is abandoned, and later probes as well.
    router.wait(lambda: not router.members.workers["a"].calls)
    slow.free()
    assert asked.error() is None
    assert slow.texts == asked.numbers and router.joined()
    router.check_rest()


def test_a_worker_that_answers_late_is_slow_and_not_dead(
    make_router: MakeRouter, no_probes: Callable[[Router], None]
) -> None:
    """On a machine without time for it: a sidecar that replaced it would make everything slower still."""
    router = make_router(0, 0, timeout_s=0.1)
    no_probes(router)
    slow = router.workers["a"]
    slow.stick()
    asked: list[Any] = []

    def is_late() -> bool:
        # Several at once: a single text would go to the other worker.
        asked.extend(router.ask(100) for _ in range(8))
        return router.timeouts("a") > 0

    router.wait(is_late)
    assert not router.joined("a", "b") and {one.error() for one in asked} == {None}
    slow.free()
    router.wait(lambda: router.timeouts("a") == 0)
    assert not router.joined("a", "b"), "it gets texts once it answers in time"
    router.check_rest()


def test_a_worker_that_died_joins_again_with_a_new_process(make_router: MakeRouter) -> None:
    router = make_router(0, 0)
    dead = router.workers["a"]
    dead.manner = "sick"
    router.wait(lambda: router.timeouts("a") >= DEAD_AFTER and router.joined("b"))
    assert [router.ask(100).error() for _ in range(10)] == [None] * 10
    assert dead.texts == []
    dead.restart()
    router.wait(lambda: router.joined("a", "b"))
    router.wait(lambda: router.timeouts("a") == 0)
    router.wait(lambda: "a: joined, bin any, generation 1" in router.lines)
    router.workers["b"].ready = False
    assert router.ask(100).error() is None
    assert len(dead.texts) == 1
    router.check_rest()


def test_the_rows_of_a_dead_process_are_retried_at_once(make_router: MakeRouter) -> None:
    router = make_router(512, 512)
    for worker in router.workers.values():
        worker.stick()
    asked = [router.ask(300) for _ in range(8)]
    router.wait(lambda: all(worker.held >= 2 for worker in router.workers.values()))
    router.workers["a"].restart()
    router.workers["b"].free()
    assert [one.error() for one in asked] == [None] * 8
    router.check_rest()


def test_a_worker_that_is_not_ready_counts_as_no_failure(make_router: MakeRouter) -> None:
    router = make_router(512, 512)
    for _ in range(6):
        for name in "ab":
            router.workers[name].ready = False
            assert [router.ask(100).error() for _ in range(3)] == [None] * 3
            router.workers[name].ready = True
            router.wait(lambda: router.joined("a", "b"))
    router.check_rest()


def test_a_bin_that_shrinks_and_grows(make_router: MakeRouter) -> None:
    router = make_router(512, 512)
    worker = router.workers["a"]
    worker.bin = 16
    asked = [router.ask(300) for _ in range(20)]
    assert [one.error() for one in asked] == [None] * 20
    router.wait(lambda: "a: joined, bin 16, generation 0" in router.lines)
    worker.bin = 64
    # Every answer carries the report.
    router.wait(lambda: router.ask(10).error() is None and "a: joined, bin 64, generation 0" in router.lines)
    assert [router.ask(300).error() for _ in range(5)] == [None] * 5
    router.check_rest()


def test_a_late_answer_of_a_replaced_process_changes_nothing(
    make_router: MakeRouter, no_probes: Callable[[Router], None]
) -> None:
    router = make_router(512)
    no_probes(router)
    worker = router.workers["a"]
    worker.stick()
    old = router.ask(300)
    router.wait(lambda: worker.held == 1 and router.running == 1)
    held, worker._free = worker._free, threading.Event()
    worker.free()
    # A new process beside it, as during a reload.
    worker.bin = 64
    router.wait(lambda: router.ask(10).error() is None and "a: joined, bin 64, generation 0" in router.lines)
    held.set()
    assert old.error() is None
    router.check_rest()
    assert router.lines[-1] == "a: joined, bin 64, generation 0"


def test_a_failing_engine_fails_no_text_that_another_computes(make_router: MakeRouter) -> None:
    router = make_router(512, 512)
    router.workers["a"].manner = "failing"
    asked = [router.ask(100, 10, 300) for _ in range(30)]
    assert [one.error() for one in asked] == [None] * 30
    router.workers["a"].free()
    router.wait(lambda: router.joined("a", "b"))
    router.check_rest()


def test_one_failure_between_answers_does_not_make_a_worker_leave(
    make_router: MakeRouter, no_probes: Callable[[Router], None]
) -> None:
    router = make_router(0)
    no_probes(router)
    worker = router.workers["a"]
    compute, failures = worker.call, iter([EngineError("out of luck"), None, EngineError("out of luck"), None])

    def call(texts: list[np.ndarray]) -> object:
        if texts and (error := next(failures, None)):
            raise error
        return compute(texts)

    worker.call = call  # type: ignore[method-assign, assignment]
    assert [router.ask(100).error() for _ in range(2)] == [None, None]
    assert router.joined("a") and not any("left" in line for line in router.lines)
    router.check_rest()


def test_a_call_of_a_dead_process_is_a_retry_of_each_of_its_texts(make_router: MakeRouter) -> None:
    router = make_router(0)
    deaths = iter([ModelDiedError("the process is not healthy")])

    def die(texts: Sequence[Ids]) -> None:
        if texts and (died := next(deaths, None)):
            raise died

    router.workers["a"].before = die
    assert router.ask(10, 20, 30).error() is None
    assert retries(router) == 3
    router.check_rest()


def test_where_every_engine_fails_the_request_fails(make_router: MakeRouter) -> None:
    router = make_router(0)
    calls = _count_calls(router)
    router.workers["a"].manner = "failing"
    asked = [router.ask(10), router.ask(10, 20)]
    for one in asked:
        error = one.error()
        assert isinstance(error, EngineError) and str(error) == "the engine failed 3 times: out of luck"
    assert all(calls[number] == 3 for one in asked for number in one.numbers)
    # A text that has failed for good is not given to another worker.
    assert retries(router) == 2 * calls.total() // 3
    router.workers["a"].free()
    assert router.ask(10).error() is None
    router.check_rest()


def _count_calls(router: Router) -> Counter[int]:
    """How often each text is in a call, from now on; a text is named by its first id."""
    calls: Counter[int] = Counter()
    for worker in router.workers.values():
        worker.before = lambda texts: calls.update(int(ids[0]) for ids in texts)
    return calls


FAULTS: tuple[Callable[[random.Random, Router], None], ...] = (
    lambda rng, router: _any(rng, router).stick(),
    lambda rng, router: _any(rng, router).stick(),
    lambda rng, router: setattr(_any(rng, router), "manner", "sick"),
    lambda rng, router: setattr(_any(rng, router), "manner", "failing"),
    lambda rng, router: setattr(_any(rng, router), "ready", False),
    lambda rng, router: _any(rng, router).restart(),
    lambda rng, router: _any(rng, router).restart(rng.choice((16, 64, 512)) if _any(rng, router).bin else 0),
    lambda rng, router: _any(rng, router).free(),
)


def _any(rng: random.Random, router: Router) -> FakeWorker:
    return rng.choice(list(router.workers.values()))


@pytest.mark.parametrize(("bins", "seed"), [((0, 0, 0), 1), ((16, 64, 512, 512), 2), ((512, 512, 64), 3)])
def test_no_request_is_lost_under_random_faults(make_router: MakeRouter, bins: tuple[int, ...], seed: int) -> None:
    router = make_router(*bins, timeout_s=0.05)
    asked: list[Asked] = []
    stop = time.monotonic() + 2.5

    def ask(number: int) -> None:
        rng = random.Random(100 * seed + number)
        while time.monotonic() < stop:
            lengths = [rng.choice((1, 10, 16, 17, 64, 100, 512)) for _ in range(rng.randint(1, 4))]
            options = rng.choice(({}, {}, {"latency_ms": 50}))
            try:
                asked.append(router.ask(*lengths, **options))
            except OverloadedError:
                assert router.waiting
            time.sleep(rng.random() * 0.02)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    rng = random.Random(seed)
    while time.monotonic() < stop:
        rng.choice(FAULTS)(rng, router)
        time.sleep(rng.random() * 0.05)
    for thread in threads:
        thread.join()
    for worker, edge in zip(router.workers.values(), bins, strict=True):
        worker.restart(bin_edge=edge)
    errors = [one.error() for one in asked]
    assert all(isinstance(error, EngineError | OverloadedError | None) for error in errors)
    assert any(error is None for error in errors) and len(asked) > 50
    router.wait(lambda: router.loaded == len(bins))
    router.check_rest()
