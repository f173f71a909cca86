from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from shapeshift.serving import responses
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
    watch.add("a", lambda: False, lambda: None)
    watch.close()
    assert set(threading.enumerate()) <= before


class Periods:
    """Replaces the watch's event: so many periods pass, then the watch ends."""

    def __init__(self, count: int) -> None:
        self._left = count

    def wait(self, period_s: float) -> bool:
        self._left -= 1
        return self._left < 0


def test_requests_that_ended_delay_no_question_and_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_MOST_ASKED", 4)
    watch = CancellationWatch(pytest.fail, ask_after_s=0)
    watch.close()
    for number in range(1000):
        watch.add(number, lambda: pytest.fail("it has ended"), lambda: None)
        watch.remove(number)
    asked: list[str] = []

    def ask(name: str) -> bool:
        asked.append(name)
        return False

    for name in "abcdef":
        watch.add(name, partial(ask, name), lambda: None)
    monkeypatch.setattr(watch, "_stop", Periods(3))
    watch._run()
    assert asked == list("abcdefabcdef")
    kept = [value for value in vars(watch).values() if hasattr(value, "__len__")]
    assert len(watch) == 6 and all(len(value) <= 6 for value in kept)


def test_requests_that_have_just_come_are_not_asked_about() -> None:
    watch, asked = CancellationWatch(pytest.fail, period_s=0.001, ask_after_s=3600), threading.Event()
    watch.add("a", partial(set_and_go_on, asked), lambda: None)
    assert not asked.wait(0.05)
    watch.close()
