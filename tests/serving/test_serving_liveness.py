"""Working threads that do no step, with a fake clock."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shapeshift.serving.liveness import Liveness, StepCounter
from shapeshift.serving.metrics import MetricsFlusher
from tests.fakes import PbUtils
from tests.waiting import wait_for


class Watch:
    """Checks once a second of a fake clock."""

    def __init__(self, *counters: StepCounter) -> None:
        self.now = 100.0
        self.log: list[str] = []
        self.liveness = Liveness(lambda: counters, self.log.append, lambda: self.now)
        self.liveness.stalled()

    def check(self, seconds: float = 1.0) -> dict[str, float]:
        self.now += seconds
        return self.liveness.stalled()

    def until_stalled(self, name: str, step: Callable[[], None] = lambda: None, most: int = 200) -> int | None:
        """After how many checks the thread is stalled; `step()` is called before each."""
        for count in range(1, most):
            step()
            if self.check()[name]:
                return count
        return None


@pytest.fixture
def work() -> threading.Event:
    """Set while work waits."""
    return threading.Event()


@pytest.fixture
def counter(work: threading.Event) -> StepCounter:
    return StepCounter("decode", work.is_set)


def test_work_without_a_step_is_stalled_after_five_seconds(counter: StepCounter, work: threading.Event) -> None:
    watch = Watch(counter)
    work.set()
    assert [watch.check()["decode"] for _ in range(8)] == [0, 0, 0, 0, 0, 0, 6, 7]


@pytest.mark.parametrize(("longest_s", "limit_s"), [(0.0, 5), (0.4, 5), (0.6, 6), (3.0, 30)])
def test_the_limit_is_ten_of_the_longest_profiled_steps(longest_s: float, limit_s: int) -> None:
    watch = Watch(StepCounter("decode", lambda: True, longest_s))
    # The first check finds the work; the limit must be passed.
    assert watch.until_stalled("decode") == limit_s + 1


def test_time_in_which_a_thread_waits_for_a_processor_does_not_count(
    counter: StepCounter, work: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of each second, from one check to the next, it waits for 0.9.
    queued_s = itertools.count(7.0, 0.9)
    monkeypatch.setattr(counter, "queued_s", lambda: next(queued_s))
    watch = Watch(counter)
    work.set()
    assert 50 <= (watch.until_stalled("decode") or 0) <= 53


def test_linux_says_how_long_a_thread_waited_for_a_processor(counter: StepCounter) -> None:
    def of_this_thread() -> float:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9

    assert counter.queued_s() == 0
    with counter.running():
        least = of_this_thread()
        assert 0 < least <= counter.queued_s() <= of_this_thread()
    assert counter.queued_s() == 0


def test_without_work_no_step_is_due(counter: StepCounter) -> None:
    assert Watch(counter).until_stalled("decode") is None


def test_a_step_a_while_is_enough(counter: StepCounter, work: threading.Event) -> None:
    watch = Watch(counter)
    work.set()
    steps = iter(range(1000))

    def step_each_fourth_second() -> None:
        if next(steps) % 4 == 0:
            counter.step()

    assert watch.until_stalled("decode", step_each_fourth_second) is None
    assert watch.until_stalled("decode") is not None
    counter.step()
    assert watch.check() == {"decode": 0.0}


def test_work_that_comes_and_goes_is_not_stalled(counter: StepCounter, work: threading.Event) -> None:
    watch = Watch(counter)
    turns = iter(range(1000))

    def come_and_go() -> None:
        (work.set if next(turns) % 2 else work.clear)()

    assert watch.until_stalled("decode", come_and_go) is None


def test_a_suspended_process_says_nothing_about_its_threads(counter: StepCounter, work: threading.Event) -> None:
    watch = Watch(counter)
    work.set()
    watch.check()
    # Each hour counts as one second.
    for _ in range(5):
        assert watch.check(3600.0) == {"decode": 0.0}
    assert watch.check() == {"decode": 6.0}


def test_threads_are_told_apart(counter: StepCounter, work: threading.Event) -> None:
    other = StepCounter("responses", lambda: True)
    watch = Watch(counter, other)
    work.set()
    for _ in range(10):
        other.step()
        found = watch.check()
    assert found == {"decode": 9.0, "responses": 0.0}


@pytest.fixture
def hanging() -> Iterator[StepCounter]:
    """The counter of a thread that hangs inside a step."""
    counter, opened = StepCounter("decode", lambda: False), threading.Event()

    def hang_here() -> None:
        assert opened.wait(120)

    def run() -> None:
        with counter.running():
            hang_here()

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: counter.has_work)
    wait_for(lambda: "hang_here" in counter.position())
    yield counter
    opened.set()
    thread.join()
    assert counter.steps == 1 and not counter.has_work and counter.position() == ""


def test_a_step_that_does_not_end_is_logged_once_with_its_place(hanging: StepCounter) -> None:
    watch = Watch(hanging)
    assert watch.until_stalled("decode") == 6
    for _ in range(20):
        watch.check()
    (line,) = watch.log
    assert line.startswith("thread decode has work and has done no step for 6 s: ")
    assert "hang_here (" in line


def test_a_thread_that_has_ended_is_stalled_when_work_comes(counter: StepCounter, work: threading.Event) -> None:
    thread = threading.Thread(target=counter.step)
    thread.start()
    thread.join()
    work.set()
    watch = Watch(counter)
    assert watch.until_stalled("decode") is not None
    assert watch.log == ["thread decode has work and has done no step for 6 s: it runs nothing"]


def test_an_error_ends_a_step(counter: StepCounter) -> None:
    with pytest.raises(KeyError), counter.running():
        raise KeyError
    assert counter.steps == 1 and not counter.has_work


def test_only_a_new_stall_is_urgent(counter: StepCounter, work: threading.Event) -> None:
    watch = Watch(counter)
    work.set()
    urgent = []
    for _ in range(8):
        watch.now += 1.0
        urgent.append(watch.liveness.metric.urgent())
    # The sixth second passes the limit of five.
    assert urgent == [False] * 6 + [True, False]


def test_the_threads_are_exported(counter: StepCounter, work: threading.Event) -> None:
    pb_utils = PbUtils()
    watch = Watch(counter, StepCounter("responses", lambda: False))
    work.set()
    flusher = MetricsFlusher(pb_utils, "m", [watch.liveness.metric], pytest.fail, period_s=1e6)
    for _ in range(8):
        watch.now += 1.0
        flusher.flush()
    exported = [
        pb_utils.metric("shapeshift_thread_stalled_seconds", thread=name, model="m") for name in ("decode", "responses")
    ]
    assert exported == [7.0, 0.0]
    counter.step()
    flusher.flush()
    assert pb_utils.metric("shapeshift_thread_stalled_seconds", thread="decode") == 0.0
    flusher.close()
