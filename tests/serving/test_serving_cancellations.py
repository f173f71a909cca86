from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from shapeshift.serving.responses import CancellationWatch


@pytest.fixture
def watch() -> Iterator[CancellationWatch]:
    made = CancellationWatch(pytest.fail, period_s=0.001, ask_after_s=0)
    yield made
    made.close()


def wait_for(event: threading.Event) -> None:
    assert event.wait(120)


def test_a_caller_who_goes_is_noticed_once(watch: CancellationWatch) -> None:
    gone, noticed = threading.Event(), threading.Semaphore(0)
    watch.add("a", gone.is_set, noticed.release)
    assert not noticed.acquire(timeout=0.05)
    gone.set()
    assert noticed.acquire(timeout=30)
    assert not noticed.acquire(timeout=0.05)
    assert len(watch) == 0


def set_and_go_on(event: threading.Event) -> bool:
    """Set the event and say that the request is not cancelled."""
    event.set()
    return False


def test_every_one_of_many_is_asked(watch: CancellationWatch) -> None:
    asked = [threading.Event() for _ in range(300)]
    for number, event in enumerate(asked):
        watch.add(number, partial(set_and_go_on, event), lambda: pytest.fail("nobody has gone"))
    for event in asked:
        wait_for(event)


def test_once_removed_nobody_asks(watch: CancellationWatch) -> None:
    asking, removed = threading.Event(), threading.Event()
    wrong: list[str] = []

    def is_cancelled() -> bool:
        if removed.is_set():
            wrong.append("asked after the removal")
        asking.set()
        time.sleep(0.01)
        if removed.is_set():
            wrong.append("still asking after the removal")
        return False

    watch.add("a", is_cancelled, lambda: wrong.append("called"))
    wait_for(asking)
    watch.remove("a")
    removed.set()
    time.sleep(0.05)
    assert not wrong
    watch.remove("a")


def test_a_question_that_fails_costs_only_itself() -> None:
    logged: list[str] = []
    watch = CancellationWatch(logged.append, period_s=0.001, ask_after_s=0)
    noticed = threading.Event()

    def fail() -> bool:
        raise RuntimeError("no parent")

    watch.add("a", fail, noticed.set)
    watch.add("b", lambda: True, noticed.set)
    wait_for(noticed)
    watch.close()
    assert len(logged) == 1 and "no parent" in logged[0]


def test_close_ends_the_thread() -> None:
    before = set(threading.enumerate())
    watch = CancellationWatch(pytest.fail)
    (thread,) = {one for one in threading.enumerate() if one.name == "cancellations"} - before
    watch.add("a", lambda: False, lambda: None)
    watch.close()
    assert not thread.is_alive()


def test_requests_are_asked_about_in_turn_and_none_that_has_ended() -> None:
    watch = CancellationWatch(pytest.fail, period_s=0.001, ask_after_s=0)
    asked: list[int] = []
    all_are_watched, rounds = threading.Event(), threading.Event()

    def ask(name: int) -> bool:
        # Those that come first are asked about before the last has come.
        if all_are_watched.is_set():
            asked.append(name)
        if len(asked) >= 500:
            rounds.set()
        return False

    # One may be asked about before it has ended, and not afterwards.
    ended: set[int] = set()
    late: list[int] = []

    def ask_early(name: int) -> bool:
        if name in ended:
            late.append(name)
        return False

    for number in range(1, 1001):
        watch.add(-number, partial(ask_early, -number), lambda: None)
        watch.remove(-number)
        ended.add(-number)
    # More than are asked about in a period.
    for name in range(150):
        watch.add(name, partial(ask, name), lambda: None)
    all_are_watched.set()
    wait_for(rounds)
    assert len(watch) == 150
    watch.close()
    assert not late
    times = Counter(asked)
    assert max(times.values()) - min(times[name] for name in range(150)) <= 1


def test_requests_that_have_just_come_are_not_asked_about() -> None:
    watch, asked = CancellationWatch(pytest.fail, period_s=0.001, ask_after_s=3600), threading.Event()
    watch.add("a", partial(set_and_go_on, asked), lambda: None)
    assert not asked.wait(0.05)
    watch.close()
