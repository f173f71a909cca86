"""The router over workers that hang, die, go, fail and change: no text is lost, none is answered twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shapeshift.errors import EngineError, OverloadedError
from shapeshift.polymorph.links import DEAD_AFTER

if TYPE_CHECKING:
    from tests.polymorph.conftest import Asked, Router

MakeRouter = Callable[..., "Router"]


def test_a_text_that_makes_every_worker_hang_is_given_up(
    make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_router(0, 0, timeout_s=0.1)
    free = threading.Event()
    compute = type(pool.workers["a"]).call

    def call(worker: object, texts: list[np.ndarray]) -> object:
        if any(len(ids) == 77 for ids in texts):
            assert free.wait(60)
        return compute(worker, texts)

    monkeypatch.setattr(type(pool.workers["a"]), "call", call)
    error = pool.ask(77).error()
    assert isinstance(error, OverloadedError) and "no answer in time" in str(error)
    assert pool.ask(100).error() is None
    free.set()
    pool.wait(lambda: pool.joined("a", "b"))
    pool.check_rest()


@pytest.mark.parametrize("bins", [(0, 0), (512, 512)])
def test_a_worker_that_hangs_is_left_and_its_texts_go_elsewhere(make_router: MakeRouter, bins: tuple[int, ...]) -> None:
    pool = make_router(*bins, timeout_s=0.2)
    hung = pool.workers["a"]
    hung.stick()
    asked = [pool.ask(100, 100) for _ in range(10)]
    assert [one.error() for one in asked] == [None] * 10
    assert hung.texts == []
    pool.wait(lambda: pool.timeouts("a") >= DEAD_AFTER)
    pool.wait(lambda: not pool._roster.links["a"].joined)
    # Others go on meanwhile, and what it is asked for its state does not pile up at once.
    assert pool.ask(100).error() is None
    hung.free()
    pool.wait(lambda: pool.joined("a", "b"))
    pool.wait(lambda: pool.timeouts("a") == 0)
    assert [pool.ask(100).error() for _ in range(10)] == [None] * 10
    pool.check_rest()


def test_the_first_answer_counts_however_late(make_router: MakeRouter) -> None:
    pool = make_router(0, timeout_s=0.1)
    pool.check_rest()
    slow = pool.workers["a"]
    slow.stick()
    asked = pool.ask(100)
    pool.wait(lambda: pool.joined() and pool.waiting == 1)
    slow.ready = False
    # Every call that it holds was given up; it has been asked for its state in vain since.
    pool.wait(lambda: not pool._roster.links["a"].under_way())
    slow.free()
    assert asked.error() is None
    assert slow.texts == asked.numbers and pool.joined()
    pool.check_rest()


def test_a_worker_that_died_joins_again_with_a_new_process(make_router: MakeRouter) -> None:
    pool = make_router(0, 0)
    dead = pool.workers["a"]
    dead.manner = "sick"
    pool.wait(lambda: pool.timeouts("a") >= DEAD_AFTER and pool.joined("b"))
    assert [pool.ask(100).error() for _ in range(10)] == [None] * 10
    assert dead.texts == []
    dead.restart()
    pool.wait(lambda: pool.joined("a", "b"))
    pool.wait(lambda: pool.timeouts("a") == 0)
    pool.wait(lambda: "a: joined, bin any, generation 1" in pool.lines)
    pool.workers["b"].ready = False
    assert pool.ask(100).error() is None
    assert len(dead.texts) == 1
    pool.check_rest()


def test_what_a_dead_process_held_goes_on_at_once(make_router: MakeRouter) -> None:
    pool = make_router(512, 512)
    for worker in pool.workers.values():
        worker.stick()
    asked = [pool.ask(300) for _ in range(8)]
    pool.wait(lambda: all(worker.held >= 2 for worker in pool.workers.values()))
    pool.workers["a"].restart()
    pool.workers["b"].free()
    assert [one.error() for one in asked] == [None] * 8
    pool.check_rest()


def test_a_worker_that_is_not_ready_costs_no_attempt(make_router: MakeRouter) -> None:
    pool = make_router(512, 512)
    for _ in range(6):
        for name in "ab":
            pool.workers[name].ready = False
            assert [pool.ask(100).error() for _ in range(3)] == [None] * 3
            pool.workers[name].ready = True
            pool.wait(lambda: pool.joined("a", "b"))
    pool.check_rest()


def test_a_bin_that_shrinks_and_grows(make_router: MakeRouter) -> None:
    pool = make_router(512, 512)
    worker = pool.workers["a"]
    worker.bin = 16
    asked = [pool.ask(300) for _ in range(20)]
    assert [one.error() for one in asked] == [None] * 20
    pool.wait(lambda: "a: joined, bin 16, generation 0" in pool.lines)
    worker.bin = 64
    # The state comes with every answer.
    pool.wait(lambda: pool.ask(10).error() is None and "a: joined, bin 64, generation 0" in pool.lines)
    assert [pool.ask(300).error() for _ in range(5)] == [None] * 5
    pool.check_rest()


def test_what_a_replaced_process_says_late_changes_nothing(
    make_router: MakeRouter, no_hellos: Callable[[Router], None]
) -> None:
    pool = make_router(512)
    no_hellos(pool)
    worker = pool.workers["a"]
    worker.stick()
    old = pool.ask(300)
    pool.wait(lambda: worker.held == 1 and pool.running == 1)
    held, worker._free = worker._free, threading.Event()
    worker.free()
    # A new process beside it, as while a model is loaded anew.
    worker.bin = 64
    pool.wait(lambda: pool.ask(10).error() is None and "a: joined, bin 64, generation 0" in pool.lines)
    held.set()
    assert old.error() is None
    pool.check_rest()
    assert pool.lines[-1] == "a: joined, bin 64, generation 0"


def test_an_engine_that_fails_costs_no_text_that_another_can_compute(make_router: MakeRouter) -> None:
    pool = make_router(512, 512)
    pool.workers["a"].manner = "failing"
    asked = [pool.ask(100, 10, 300) for _ in range(30)]
    assert [one.error() for one in asked] == [None] * 30
    pool.workers["a"].free()
    pool.wait(lambda: pool.joined("a", "b"))
    pool.check_rest()


def test_where_every_engine_fails_the_caller_is_told(make_router: MakeRouter) -> None:
    pool = make_router(0)
    pool.workers["a"].manner = "failing"
    asked = [pool.ask(10), pool.ask(10, 20)]
    for one in asked:
        error = one.error()
        assert isinstance(error, EngineError) and str(error) == "the engine failed 3 times: out of luck"
    pool.workers["a"].free()
    assert pool.ask(10).error() is None
    pool.check_rest()


FAULTS: tuple[Callable[[random.Random, Router], None], ...] = (
    lambda rng, pool: _any(rng, pool).stick(),
    lambda rng, pool: _any(rng, pool).stick(),
    lambda rng, pool: setattr(_any(rng, pool), "manner", "sick"),
    lambda rng, pool: setattr(_any(rng, pool), "manner", "failing"),
    lambda rng, pool: setattr(_any(rng, pool), "ready", False),
    lambda rng, pool: _any(rng, pool).restart(),
    lambda rng, pool: _any(rng, pool).restart(rng.choice((16, 64, 512)) if _any(rng, pool).bin else 0),
    lambda rng, pool: _any(rng, pool).free(),
)


def _any(rng: random.Random, pool: Router) -> object:
    return rng.choice(list(pool.workers.values()))


@pytest.mark.parametrize(("bins", "seed"), [((0, 0, 0), 1), ((16, 64, 512, 512), 2), ((512, 512, 64), 3)])
def test_nothing_is_lost_whatever_happens(make_router: MakeRouter, bins: tuple[int, ...], seed: int) -> None:
    pool = make_router(*bins, timeout_s=0.05)
    asked: list[Asked] = []
    stop = time.monotonic() + 2.5

    def ask(number: int) -> None:
        rng = random.Random(100 * seed + number)
        while time.monotonic() < stop:
            lengths = [rng.choice((1, 10, 16, 17, 64, 100, 512)) for _ in range(rng.randint(1, 4))]
            options = rng.choice(({}, {}, {"latency_ms": 50}, {"is_cancelled": lambda: False}))
            try:
                asked.append(pool.ask(*lengths, **options))
            except OverloadedError:
                assert pool.waiting
            time.sleep(rng.random() * 0.02)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    rng = random.Random(seed)
    while time.monotonic() < stop:
        rng.choice(FAULTS)(rng, pool)
        time.sleep(rng.random() * 0.05)
    for thread in threads:
        thread.join()
    for worker, edge in zip(pool.workers.values(), bins, strict=True):
        worker.restart(bin_edge=edge)
    errors = [one.error() for one in asked]
    assert all(isinstance(error, EngineError | OverloadedError | None) for error in errors)
    assert any(error is None for error in errors) and len(asked) > 50
    pool.wait(lambda: pool.loaded == len(bins))
    pool.check_rest()
