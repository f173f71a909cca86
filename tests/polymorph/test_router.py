"""The router over workers that answer: who gets what, what is refused, what waits, and its end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from shapeshift.engines import request
from shapeshift.errors import CancelledRequestError, OverloadedError
from shapeshift.polymorph import links
from shapeshift.polymorph import router as router_module
from shapeshift.serving.metrics import Gauge

if TYPE_CHECKING:
    from tests.polymorph.conftest import Router

MakeRouter = Callable[..., "Router"]
SHARED, DISPATCHED = (0, 0), (16, 64, 512)


@pytest.mark.parametrize("bins", [SHARED, DISPATCHED])
def test_every_text_gets_its_answer(make_router: MakeRouter, bins: tuple[int, ...]) -> None:
    pool = make_router(*bins, queue_rows=10**4, queue_tokens=10**6)
    rng = random.Random(1)
    asked = [pool.ask(*(rng.randint(1, 512) for _ in range(rng.randint(1, 9)))) for _ in range(200)]
    assert [one.error() for one in asked] == [None] * 200
    pool.check_rest()
    assert sorted(text for worker in pool.workers.values() for text in worker.texts) == sorted(
        number for one in asked for number in one.numbers
    )


def test_a_text_goes_to_a_worker_that_is_long_enough(make_router: MakeRouter) -> None:
    pool = make_router(*DISPATCHED)
    short, middle, long = (pool.ask(length) for length in (16, 17, 65))
    assert [one.error() for one in (short, middle, long)] == [None] * 3
    assert long.numbers[0] in pool.workers["c"].texts
    assert middle.numbers[0] not in pool.workers["a"].texts


def test_at_most_two_calls_are_in_a_worker_and_the_rest_waits_here(
    make_router: MakeRouter, no_hellos: Callable[[Router], None]
) -> None:
    pool = make_router(0)
    no_hellos(pool)
    pool.workers["a"].stick()
    asked = [pool.ask(100) for _ in range(9)]
    pool.wait(lambda: pool.workers["a"].held >= 2 and pool.waiting <= 7)
    assert pool.workers["a"].held == 2 and pool.waiting == 7 and pool.running == 2
    pool.workers["a"].free()
    assert [one.error() for one in asked] == [None] * 9
    pool.check_rest()


def test_a_worker_of_an_older_build_takes_what_it_can(make_router: MakeRouter) -> None:
    pool = make_router(48, 8, 0, wait=False)
    pool.wait(lambda: pool.joined("a", "c"))
    assert [one.error() for one in [pool.ask(length) for length in (16, 17, 48, 512)]] == [None] * 4
    assert not pool.workers["b"].texts
    assert pool.lines.count("b: not used, its bin 8 is none of this model's") == 1


def test_one_that_holds_one_bin_gets_nothing_of_a_shared_queue(make_router: MakeRouter) -> None:
    pool = make_router(0, 0)
    pool.workers["b"].restart(bin_edge=64)
    pool.wait(lambda: pool.joined("a"))
    assert [pool.ask(length).error() for length in (3, 500)] == [None] * 2
    pool.workers["b"].restart(bin_edge=0)
    pool.wait(lambda: pool.joined("a", "b"))


# What waits, and what is refused.


def test_a_full_queue_refuses_and_an_empty_one_takes_any_request(make_router: MakeRouter) -> None:
    pool = make_router(0, wait=False, queue_rows=3, queue_tokens=500)
    pool.workers["a"].ready = False
    pool.wait(lambda: pool.joined())
    large = pool.ask(*[100] * 5)
    with pytest.raises(OverloadedError, match="5 rows wait, 1 more exceed 3; retry later"):
        pool.ask(1)
    pool.workers["a"].restart()
    assert large.error() is None
    pool.check_rest()
    pool.workers["a"].ready = False
    pool.wait(lambda: pool.joined())
    waiting = pool.ask(300)
    with pytest.raises(OverloadedError, match="300 tokens wait, 201 more exceed 500"):
        pool.ask(201)
    also = pool.ask(200)
    pool.workers["a"].restart()
    assert waiting.error() is None and also.error() is None
    pool.check_rest()


def test_without_a_worker_texts_wait_and_are_told_at_last(
    make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_router(16, 16, wait=False)
    served, lost = pool.ask(10), pool.ask(10, 65)
    assert served.error() is None
    pool.wait(lambda: pool.joined("a", "b") and pool.waiting == 1)
    assert not lost.answered
    monkeypatch.setattr(router_module, "_NO_WORKER_S", 0.0)
    error = lost.error()
    assert isinstance(error, OverloadedError)
    assert str(error) == "no worker for a text of 65 tokens is there; is the scheduler running?"
    pool.check_rest()


def test_a_worker_that_comes_finds_what_waited_for_it(make_router: MakeRouter) -> None:
    pool = make_router(16, 16)
    long = pool.ask(500)
    pool.wait(lambda: pool.waiting == 1)
    pool.workers["b"].restart(bin_edge=512)
    assert long.error() is None
    pool.check_rest()


def test_latency_ms_that_runs_out_is_told_while_others_wait_on(make_router: MakeRouter) -> None:
    pool = make_router(0)
    pool.workers["a"].stick()
    running = [pool.ask(100) for _ in range(2)]
    pool.wait(lambda: pool.workers["a"].held >= 2)
    patient, late = pool.ask(100), pool.ask(100, latency_ms=5)
    assert isinstance(late.error(), OverloadedError) and not patient.answered
    pool.workers["a"].free()
    assert [one.error() for one in (*running, patient)] == [None] * 3
    assert late.numbers[0] not in pool.workers["a"].texts
    pool.check_rest()


def test_a_cancelled_request_is_not_computed(make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "_ASK_AFTER_S", 0.0)
    pool = make_router(0, wait=False)
    pool.workers["a"].ready = False
    pool.wait(lambda: pool.joined())
    gone, stays = pool.ask(100, 100, is_cancelled=lambda: True), pool.ask(100, is_cancelled=lambda: False)
    pool.workers["a"].restart()
    assert isinstance(gone.error(), CancelledRequestError) and stays.error() is None
    assert pool.workers["a"].texts == stays.numbers
    pool.check_rest()


def test_what_a_leaving_worker_was_woken_for_goes_to_another(
    make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_router(0, 0)
    monkeypatch.setattr(links, "_PAUSE_S", 1e6)
    monkeypatch.setattr(links, "_LONGEST_PAUSE_S", 1e6)
    pool.check_rest()
    one = request.TextRequest([[7]], lambda done: None)  # type: ignore[list-item]
    with pool._lock:
        pool._roster.put(one.rows)
        chosen = pool.assignment.more()
        pool._roster.leave(pool._roster.links[str(chosen)], "was told to")
    pool.wait(lambda: one.ended)


# The end.


def test_close_answers_everything_and_ends_every_thread(make_router: MakeRouter) -> None:
    before = set(threading.enumerate())
    pool = make_router(0)
    worker = pool.workers["a"]
    worker.stick()
    asked = [pool.ask(100) for _ in range(6)]
    pool.wait(lambda: worker.held >= 2)
    closing = threading.Thread(target=pool.close)
    closing.start()
    # What waits is told at once, while two calls run on.
    pool.wait(lambda: sum(one.answered for one in asked) >= 4)
    worker.free()
    closing.join(30)
    errors = [one.error() for one in asked]
    assert sum(error is None for error in errors) == len(worker.texts) <= 2
    assert all(isinstance(error, OverloadedError | None) for error in errors)
    with pytest.raises(OverloadedError, match="being unloaded"):
        pool.ask(1)
    pool.wait(lambda: set(threading.enumerate()) <= before)


def test_a_call_that_fails_during_close_is_answered(make_router: MakeRouter) -> None:
    pool = make_router(0)
    worker = pool.workers["a"]
    worker.stick()
    asked = pool.ask(1)
    pool.wait(lambda: pool.running == 1 and worker.held >= 1)
    closing = threading.Thread(target=pool.close)
    closing.start()
    pool.wait(pool._closing.is_set)
    worker.restart()
    assert isinstance(asked.error(), OverloadedError)
    closing.join(30)
    assert not closing.is_alive()


def test_close_answers_for_a_call_that_never_ends(make_router: MakeRouter) -> None:
    pool = make_router(0)
    pool.workers["a"].stick()
    asked = pool.ask(1)
    pool.wait(lambda: pool.running == 1)
    pool.close(timeout_s=0.05)
    assert isinstance(asked.error(), OverloadedError)


def test_what_is_exported(make_router: MakeRouter) -> None:
    pool = make_router(0, 0)
    asked = pool.ask(*[100] * 3)
    assert asked.error() is None
    pool.check_rest()

    def read() -> dict[str, float]:
        found = {}
        for metric in pool.metrics():
            value = metric.read() if isinstance(metric, Gauge) else metric.value
            found["/".join([metric.name.removeprefix("shapeshift_"), *metric.labels.values()])] = value
        return found

    values = read()
    assert values["workers_joined"] == 2 and values["worker_rows_total"] == 3
    assert values["worker_calls_total"] >= 2
    assert values["retries_total"] == values["timeouts_total"] == 0
    for name in "ab":
        assert values[f"worker_outstanding/{name}"] == values[f"worker_timeouts/{name}"] == 0
    pool.workers["a"].stick()
    pool.workers["b"].stick()
    held = pool.ask(100, 100)
    pool.wait(lambda: pool.running == 2)
    assert read()["worker_outstanding/a"] + read()["worker_outstanding/b"] == 2
    for name in "ab":
        pool.workers[name].free()
    assert held.error() is None
