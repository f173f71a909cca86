"""The pool for calls that may never return: every call has one outcome, and a stuck one costs only its own thread."""

from __future__ import annotations

import gc
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from shapeshift.errors import EngineError, OverloadedError
from shapeshift.serving import call_pool
from shapeshift.serving.call_pool import CallPool, CallTimeoutError
from tests.waiting import wait_for


class Call:
    """A call that returns `value` after `finish`, and every outcome that was reported for it."""

    def __init__(self, pool: CallPool, key: str = "a", timeout_s: float = math.inf, stuck: bool = True) -> None:
        self.outcomes: list[object] = []
        self.began = threading.Event()
        self.error: Exception | None = None
        self._may_end = threading.Event()
        if not stuck:
            self._may_end.set()
        pool.submit(key, self._run, self.outcomes.append, time.monotonic() + timeout_s)

    def finish(self) -> None:
        self._may_end.set()

    def outcome(self) -> object:
        wait_for(lambda: self.outcomes)
        assert len(self.outcomes) == 1
        return self.outcomes[0]

    def _run(self) -> int:
        self.began.set()
        assert self._may_end.wait(120)
        if self.error is not None:
            raise self.error
        return 7


MakePool = Callable[..., CallPool]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    pools: list[CallPool] = []

    def make(threads: int = 2, name: str = "test-call", **options: float) -> CallPool:
        pools.append(CallPool(name, threads, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(0.0)


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("threads-3"))


def test_results_and_errors_are_reported_once(make_pool: MakePool) -> None:
    pool = make_pool()
    good, bad = Call(pool), Call(pool)
    bad.error = EngineError("broken")
    for call in (good, bad):
        call.finish()
    assert good.outcome() == 7
    assert bad.outcome() is bad.error
    wait_for(lambda: pool.running == 0)
    assert (pool.waiting, pool.timeouts, pool.abandoned()) == (0, 0, 0)


def test_threads_start_when_they_are_needed_and_are_used_again(make_pool: MakePool) -> None:
    pool = make_pool(threads=3, name="threads-3")
    assert not names()
    for _ in range(5):
        assert Call(pool, stuck=False).outcome() == 7
        wait_for(lambda: pool.running == 0)
    assert names() == ["threads-3", "threads-3-deadlines"]
    calls = [Call(pool) for _ in range(7)]
    wait_for(lambda: pool.running == 3)
    assert pool.waiting == 4 and len(names()) == 4
    for call in calls:
        call.finish()
    assert [call.outcome() for call in calls] == [7] * 7


def test_a_call_made_by_done_needs_no_thread_beyond_the_limit(make_pool: MakePool) -> None:
    pool = make_pool(threads=1)
    found: list[object] = []

    def again(outcome: object) -> None:
        found.append(outcome)
        if len(found) < 50:
            pool.submit("a", lambda: len(found), again, math.inf)

    pool.submit("a", lambda: 0, again, math.inf)
    wait_for(lambda: len(found) == 50)
    assert found == list(range(50))


def test_a_late_call_is_abandoned_and_others_go_on(make_pool: MakePool) -> None:
    pool = make_pool(threads=1)
    late = Call(pool, "slow", timeout_s=0.01)
    behind = Call(pool, "quick", stuck=False)
    error = late.outcome()
    assert isinstance(error, CallTimeoutError) and error.started and str(error) == "slow: no answer in time"
    assert behind.outcome() == 7
    assert (pool.abandoned("slow"), pool.abandoned("quick"), pool.abandoned(), pool.timeouts) == (1, 0, 1, 1)
    late.finish()
    wait_for(lambda: pool.abandoned() == 0)
    assert len(late.outcomes) == 1


def test_a_call_whose_deadline_passes_while_it_waits_is_never_run(make_pool: MakePool) -> None:
    pool = make_pool(threads=1)
    first, second = Call(pool), Call(pool, timeout_s=0.01)
    error = second.outcome()
    assert isinstance(error, CallTimeoutError) and not error.started
    assert (pool.timeouts, pool.abandoned()) == (0, 0)
    first.finish()
    assert first.outcome() == 7 and not second.began.is_set()


def test_a_process_that_stood_still_takes_no_call_for_late(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(standstill_s=10.0)
    call = Call(pool, timeout_s=60.0)
    assert call.began.wait(120)
    clock = time.monotonic
    monkeypatch.setattr(call_pool.time, "monotonic", lambda: clock() + 1000.0)
    time.sleep(0.05)
    assert not call.outcomes
    call.finish()
    assert call.outcome() == 7


def test_an_error_in_done_ends_no_thread(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(threads=1)
    printed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    def fail(outcome: object) -> None:
        raise KeyError(str(outcome))

    pool.submit("a", lambda: 3, fail, math.inf)
    never = threading.Event()
    pool.submit("a", lambda: never.wait(30), fail, time.monotonic() + 0.01)
    wait_for(lambda: len(printed) == 2)
    assert [args.exc_type for args in printed] == [KeyError, KeyError]
    assert Call(pool, stuck=False).outcome() == 7
    late = Call(pool, timeout_s=0.01)
    assert isinstance(late.outcome(), CallTimeoutError)
    for event in (never, late._may_end):
        event.set()


def test_close_reports_every_call_and_ends_the_threads(make_pool: MakePool) -> None:
    before = set(threading.enumerate())
    pool = make_pool(threads=2)
    stuck, ends, waits = Call(pool), Call(pool), Call(pool)
    wait_for(lambda: pool.running == 2)
    closing = threading.Thread(target=pool.close, args=(0.2,))
    closing.start()
    assert isinstance(waits.outcome(), OverloadedError)
    ends.finish()
    assert ends.outcome() == 7
    closing.join(30)
    error = stuck.outcome()
    assert isinstance(error, CallTimeoutError) and "unloaded" in str(error)
    with pytest.raises(OverloadedError, match="being unloaded"):
        Call(pool)
    stuck.finish()
    wait_for(lambda: set(threading.enumerate()) <= before)
    assert pool.abandoned() == 0


def test_close_waits_no_longer_than_the_calls_may_take(make_pool: MakePool) -> None:
    pool = make_pool()
    stuck = Call(pool, timeout_s=1.0)
    assert stuck.began.wait(120)
    threading.Thread(target=pool.close, args=(600.0,), daemon=True).start()
    assert isinstance(stuck.outcome(), CallTimeoutError)
    stuck.finish()


def test_close_returns_after_every_done(make_pool: MakePool) -> None:
    pool = make_pool()
    found: list[object] = []

    def slowly(outcome: object) -> None:
        time.sleep(0.1)
        found.append(outcome)

    pool.submit("a", lambda: 1, slowly, math.inf)
    wait_for(lambda: pool.running == 1)
    pool.close()
    assert found == [1]


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_each_have_one_outcome(make_pool: MakePool, seed: int) -> None:
    rng = random.Random(seed)
    pool = make_pool(threads=3)
    reported: list[list[object]] = []
    for _ in range(500):
        outcomes: list[object] = []
        pause = rng.choice((0.0, 0.0, 0.001, 0.01))
        deadline = time.monotonic() + rng.choice((0.001, 0.005, 10.0))
        pool.submit(rng.choice("ab"), partial(time.sleep, pause), outcomes.append, deadline)
        reported.append(outcomes)
    wait_for(lambda: pool.waiting == pool.running == pool.abandoned() == 0)
    assert all(len(outcomes) == 1 for outcomes in reported)
    assert all(outcome is None or isinstance(outcome, CallTimeoutError) for (outcome,) in reported)
    assert any(outcome is None for (outcome,) in reported)


def test_without_threads_a_call_still_ends_at_its_deadline(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(threads=2, name="scarce")
    late = Call(pool, "slow", timeout_s=0.05)
    assert late.began.wait(120)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "scarce":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    waiting = Call(pool, "other", timeout_s=0.1)
    assert isinstance(late.outcome(), CallTimeoutError)
    error = waiting.outcome()
    assert isinstance(error, CallTimeoutError) and not error.started
    monkeypatch.undo()
    late.finish()
    assert Call(pool, stuck=False).outcome() == 7


def test_close_waits_for_an_outcome_that_is_being_reported(make_pool: MakePool) -> None:
    pool = make_pool(threads=1)
    reporting, reported = threading.Event(), []

    def done(outcome: object) -> None:
        reporting.set()
        time.sleep(0.2)
        reported.append(outcome)

    release = threading.Event()
    pool.submit("slow", lambda: release.wait(30), done, time.monotonic() + 0.01)
    assert reporting.wait(120)
    pool.close()
    assert len(reported) == 1
    release.set()


def test_an_idle_thread_holds_no_call(make_pool: MakePool) -> None:
    pool = make_pool(threads=1)
    call = Call(pool, stuck=False)
    call.outcome()
    wait_for(lambda: pool.running == 0)
    held = weakref.ref(call)
    del call
    gc.collect()
    wait_for(lambda: held() is None)
