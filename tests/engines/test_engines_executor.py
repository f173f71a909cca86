"""The engine threads of one model: who serves when, what is counted, and how they end. Engines are fakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.execution.executor import EngineExecutor, ExecutorSettings
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.hardware import cores
from shapeshift.engines.manifest import EngineEntry
from shapeshift.engines.policy.packs import MOST_CORES
from shapeshift.errors import EngineError, OverloadedError
from shapeshift.serving.metrics import Counter, Gauge
from shapeshift.settings import Choices
from tests.engines.fake_engines import FakeEngines, entry, manifest
from tests.waiting import wait_for

# Small bounds, and none of time.
SETTINGS = {"engine_threads": 2, "queue_rows": 8, "max_queue_ms": 0.0, "memory_mb": 1 << 20}
Make = Callable[..., EngineExecutor]


@pytest.fixture
def fake() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def make(fake: FakeEngines, log: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setitem(globals(), "FAKE", fake)
    fakes: Choices[Any] = Choices("provider", {"fake": f"{__name__}:FAKE"})
    monkeypatch.setattr("shapeshift.engines.execution.executor.PROVIDERS", fakes)
    made: list[EngineExecutor] = []

    def start(device: int | None = None, engines: tuple[EngineEntry, ...] = (), **settings: Any) -> EngineExecutor:
        found = engines or (entry(4, 5.0), entry(None))
        made.append(
            EngineExecutor(
                manifest(*found), Path("f"), ExecutorSettings(**{**SETTINGS, **settings}), log.append, device
            )
        )
        return made[-1]

    yield start
    for one in made:
        one.close(5.0)


class Answer:
    """A request of texts of these lengths, and what became of it."""

    def __init__(self, executor: EngineExecutor, *lengths: int, latency_ms: float | None = None) -> None:
        self.ended = threading.Event()
        texts = [np.ones(length, np.int64) for length in lengths]
        self.request = TextRequest(texts, lambda request: self.ended.set(), latency_ms)
        executor.submit(self.request)

    def vectors(self) -> list[float]:
        assert self.ended.wait(120)
        if self.request.error is not None:
            raise self.request.error
        return [float(one[0]) for one in self.request.outputs["EMBEDDING"]]


def test_every_thread_gets_every_engine_the_dynamic_one_first(make: Make, fake: FakeEngines) -> None:
    executor = make()
    assert executor.wait_loaded(30)
    assert fake.made == [None, None, 4, 4]
    assert (len(executor.threads), executor.loaded) == (2, 2)
    assert [thread.engines.loaded for thread in executor.threads] == [["dynamic", "4"]] * 2
    assert fake.opened == [(Path("f"), "f32", 1, None)]


def test_a_gpu_has_one_thread_and_a_cpu_as_many_as_cores(make: Make) -> None:
    counts = []
    for device, threads in ((7, 0), (7, 5), (None, 0), (None, 5)):
        executor = make(device, engine_threads=threads)
        assert executor.wait_loaded(30)
        counts.append(len(executor.threads))
    assert counts == [1, 1, cores(), 5]


def test_no_engine_counts_as_loaded_while_threads_are_to_start(make: Make, fake: FakeEngines) -> None:
    others = threading.Event()

    def wait(count: int) -> None:
        if count:
            assert others.wait(120)

    fake.starts = wait
    executor = make()
    assert executor.loaded == 0 and len(executor.threads) == len(executor.steps) == 1
    # The first one serves meanwhile.
    assert Answer(executor, 3).vectors() == [3.0]
    others.set()
    assert executor.wait_loaded(30) and executor.loaded == 2


def test_a_thread_that_cannot_start_leaves_the_others_in_service(make: Make, fake: FakeEngines, log: list[str]) -> None:
    def fail(count: int) -> None:
        if count == 1:
            fake.made.append(-1)
            raise OSError("no memory")

    fake.starts = fail
    executor = make(engine_threads=3)
    assert executor.wait_loaded(30)
    assert len(executor.threads) == 1 and executor.loaded == 2
    assert log == ["engine thread 1 cannot be started, 1 serve: no memory"]


def test_calls_and_texts_are_counted_and_forgotten_rows_are_not(make: Make) -> None:
    executor = make(engine_threads=1, pack_tokens=4)
    assert executor.wait_loaded(30)
    assert Answer(executor, 2, 4).vectors() == [2.0, 4.0]
    assert Answer(executor, 8).vectors() == [8.0]
    (thread,) = executor.threads
    wait_for(lambda: thread.busy_rows == 0)
    assert (thread.calls, thread.rows, thread.busy_ms) == (3, 3, 0.0)
    assert executor.lengths_seen == [0, 0, 1, 0, 1, 0, 0, 0, 1]
    assert (executor.waiting, executor.running) == (0, 0)
    metrics = executor.metrics()
    by_engine = [one for one in metrics if isinstance(one, Counter) and one.labels]
    used, seconds = (
        {one.labels["engine"]: one.value for one in by_engine if one.name == f"shapeshift_engine_{what}_total"}
        for what in ("used", "seconds")
    )
    assert len(used) == 2 and sum(used.values()) == 3, "the first call of each is not counted"
    assert {name for name, value in seconds.items() if value > 0} == {name for name, calls in used.items() if calls}
    found = {one.name: one.read() if isinstance(one, Gauge) else one.value for one in metrics[:3]}  # type: ignore[union-attr]
    assert found == {
        "shapeshift_engines_loaded": 2,
        "shapeshift_engine_calls_total": 3,
        "shapeshift_engine_rows_total": 3,
    }


def test_what_runs_and_what_waits_is_seen(make: Make, fake: FakeEngines) -> None:
    computing, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        computing.set()
        assert may_end.wait(120)

    executor = make(engine_threads=1, pack_tokens=1)
    assert executor.wait_loaded(30)
    fake.computes = hold
    first = Answer(executor, 2)
    assert computing.wait(120)
    second = Answer(executor, 3, 4)
    (thread,) = executor.threads
    assert (executor.running, executor.waiting) == (1, 2)
    # A call of two tokens takes what the static engine of four takes; the third thread is none.
    assert thread.busy_ms == 5.0
    assert thread.steps.has_work
    own = [executor.row_ms(row) for row in second.request.rows]
    assert own == [5.0, 5.0]
    assert executor.predicted_ms(second.request.rows) == pytest.approx(5.0 + sum(own) + sum(own))
    may_end.set()
    assert (first.vectors(), second.vectors()) == ([2.0], [3.0, 4.0])


def test_an_engine_that_fails_fails_its_rows_and_not_the_thread(make: Make, fake: FakeEngines) -> None:
    executor = make(engine_threads=1)

    def fail() -> None:
        raise ValueError("out of luck")

    fake.computes = fail
    with pytest.raises(EngineError, match="^the engine failed: out of luck$"):
        Answer(executor, 2, 3).vectors()
    fake.computes = lambda: None
    assert Answer(executor, 2).vectors() == [2.0]
    (thread,) = executor.threads
    assert (thread.calls, thread.rows) == (2, 3)


def test_a_call_takes_the_cores_of_threads_that_are_idle(make: Make, fake: FakeEngines) -> None:
    computing, may_end = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        computing.release()
        assert may_end.wait(120)

    fake.threaded = True
    executor = make(engine_threads=4, pack_tokens=1)
    assert executor.wait_loaded(30)
    fake.computes = hold
    answers = []
    for _ in range(4):
        answers.append(Answer(executor, 2))
        assert computing.acquire(timeout=120)
    may_end.set()
    assert [one.vectors() for one in answers] == [[2.0]] * 4
    assert (fake.calls, fake.ends) == ([4, 2, 1, 1], [1] * 4), "those that run give up what is not their share"
    # Longer than a lull.
    time.sleep(0.02)
    assert Answer(executor, 2).vectors() == [2.0]
    assert fake.calls[-1] == 4
    # Those that arrive together share the cores from the start.
    executor.queue.put(TextRequest([np.ones(2, np.int64)] * 4, lambda request: None).rows)
    wait_for(lambda: len(fake.calls) == 9)
    assert fake.calls[-4] == 1


def test_cores_that_a_call_gave_up_do_not_count_again(make: Make, fake: FakeEngines) -> None:
    fake.threaded = True
    executor = make(engine_threads=4)
    assert executor.wait_loaded(30)
    runs, begins = executor.threads[:2]
    runs.busy_rows = begins.busy_rows = 1
    runs.cores = 1
    assert (executor.share_cores(begins), runs.cores) == (2, 1)
    runs.busy_rows = begins.busy_rows = 0


def test_no_more_cores_are_taken_than_a_call_has_work_for(make: Make, fake: FakeEngines) -> None:
    fake.threaded = True
    executor = make(engine_threads=2 * MOST_CORES)
    assert executor.wait_loaded(60)
    assert Answer(executor, 2).vectors() == [2.0]
    assert fake.calls == [MOST_CORES]


@pytest.mark.parametrize(("threaded", "learns"), [(True, False), (False, True)])
def test_a_call_on_several_cores_says_nothing_of_the_profile(
    make: Make, fake: FakeEngines, threaded: bool, learns: bool
) -> None:
    fake.threaded = threaded
    # So slow by the profile that no delay makes several cores look useless.
    executor = make(engines=(entry(None, 1e6),))
    assert executor.wait_loaded(30)
    observed: list[float] = []
    executor.observe = lambda profiled_ms, took_ms: observed.append(profiled_ms)  # type: ignore[method-assign]
    for _ in range(3):
        assert Answer(executor, 2).vectors() == [2.0]
        wait_for(lambda: executor.running == 0)
    executor.close()
    assert observed == ([1e6] * 3 if learns else [])


def test_an_empty_queue_takes_what_would_be_late_and_a_filled_one_does_not(make: Make, fake: FakeEngines) -> None:
    computing, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        computing.set()
        assert may_end.wait(120)

    executor = make(engine_threads=1, max_queue_ms=0.01, pack_tokens=1)
    fake.computes = hold
    answers = [Answer(executor, 2)]
    assert computing.wait(120)
    answers.append(Answer(executor, 2))
    with pytest.raises(OverloadedError, match="max_queue_ms"):
        Answer(executor, 2)
    may_end.set()
    assert [one.vectors() for one in answers] == [[2.0], [2.0]]


def test_close_fails_what_waits_finishes_what_runs_and_ends_every_thread(make: Make, fake: FakeEngines) -> None:
    before = set(threading.enumerate())
    computing, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        computing.set()
        assert may_end.wait(120)

    executor = make(engine_threads=1, pack_tokens=1)
    fake.computes = hold
    runs = Answer(executor, 2)
    assert computing.wait(120)
    waits = Answer(executor, 2)
    closing = threading.Thread(target=executor.close)
    closing.start()
    with pytest.raises(OverloadedError, match="unloaded"):
        waits.vectors()
    may_end.set()
    closing.join(30)
    assert runs.vectors() == [2.0]
    assert set(threading.enumerate()) <= before


def test_closing_starts_no_further_thread(make: Make, fake: FakeEngines) -> None:
    starting, may_start = threading.Event(), threading.Event()

    def hold(count: int) -> None:
        if count == 1:
            starting.set()
            assert may_start.wait(120)

    fake.starts = hold
    executor = make(engine_threads=3)
    assert starting.wait(120)
    closing = threading.Thread(target=executor.close)
    closing.start()
    wait_for(executor._stopping.is_set)
    may_start.set()
    closing.join(30)
    # The thread that was starting may; the one behind it does not.
    assert len(executor.threads) == 2
