"""The client of later levels: which calls are made, how each ends, and what is exported of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapeshift.cascade import level_client
from shapeshift.cascade.level_client import TIMEOUT_S, LevelCall, LevelClient, LevelGoneError, LevelResult
from shapeshift.errors import ModelDiedError, ModelGoneError, OverloadedError, TimedOutError
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.triton.async_client import ModelCall
from tests.cascade.conftest import FakeClient
from tests.fakes import PbUtils
from tests.waiting import wait_for

NONE: Any = None


class ScriptedClient(FakeClient):
    """Every call is one of `answer`, on a thread of its own."""

    def __init__(self, answer: Callable[[], dict[str, np.ndarray]]) -> None:
        super().__init__(PbUtils())
        self._script = answer
        self.calls = 0

    def has(self, model: str) -> bool:
        return True

    def _answer(self, call: ModelCall) -> dict[str, np.ndarray]:
        self.calls += 1
        return self._script()


def level_client_of(
    answer: Callable[[], dict[str, np.ndarray]], most_calls: int = 1000, **seconds: float
) -> tuple[LevelClient, ScriptedClient]:
    client = ScriptedClient(answer)
    return LevelClient(client, lambda line: None, most_calls, **seconds), client


def to(model: str, rows: int = 1, deadline: float | None = None) -> LevelCall:
    return LevelCall(model, [[b"a"]] * rows, ["LOGITS"], deadline=deadline)


def exported(client: LevelClient) -> dict[str, float]:
    """By name, without what the names have in common."""
    metrics = {metric.name: metric for metric in client.metrics()}
    return {
        name: metrics[f"shapeshift_level_{name}_total"].value  # type: ignore[union-attr]
        for name in ("calls", "failures", "timeouts")
    }


def test_every_call_to_a_level_ends_once() -> None:
    numbers = itertools.count()

    def slow() -> dict[str, np.ndarray]:
        # The third of every four takes too long.
        time.sleep(0.3 if next(numbers) % 4 == 2 else 0)
        return {"LOGITS": np.zeros((1, 2))}

    client, _ = level_client_of(slow, timeout_s=0.15, retry_s=1e-3)
    outcomes: list[Any] = []
    made = refused = 0
    # On a busy machine the fast ones take too long too: sixty, and more until one is in time.
    while made < 60 or not any(isinstance(one, LevelResult) for one in outcomes):
        made += 1
        try:
            client.submit(to("m"), outcomes.append)
        except LevelGoneError:
            refused += 1
            time.sleep(0.002)
        if made >= 60:
            wait_for(lambda: not client.in_flight)
    wait_for(lambda: len(outcomes) + refused == made)
    time.sleep(0.05)
    assert len(outcomes) + refused == made and client.in_flight == 0
    client.close()


def test_a_failing_level_is_refused_with_its_failures_and_queue_bounds_hold() -> None:
    def fail() -> dict[str, np.ndarray]:
        raise ModelGoneError("not ready")

    client, _ = level_client_of(fail, retry_s=60.0)
    outcomes: list[Any] = []
    client.submit(to("m"), outcomes.append)
    wait_for(lambda: bool(outcomes))
    with pytest.raises(LevelGoneError, match=r"model m failed 1 times in the last \d+\.\d s; retry later"):
        client.submit(to("m"), outcomes.append)
    client.close()
    with pytest.raises(OverloadedError, match="being unloaded"):
        client.submit(to("n"), outcomes.append)


def test_no_more_calls_run_than_are_allowed() -> None:
    """One whose request has its answer counts until it ends: it is a call to the level still."""
    release = threading.Event()
    client, _ = level_client_of(lambda: {"LOGITS": np.zeros((1, 2)) if release.wait(120) else NONE}, most_calls=2)
    outcomes: list[Any] = []
    client.submit(to("m"), outcomes.append)
    client.submit(to("m", deadline=time.monotonic() + 0.02), outcomes.append)
    wait_for(lambda: bool(outcomes))
    with pytest.raises(OverloadedError, match="queue_rows: 2 calls run, 1 more .* retry later"):
        client.submit(to("m"), outcomes.append)
    release.set()
    wait_for(lambda: client.in_flight == 0)
    client.submit(to("m"), outcomes.append)
    wait_for(lambda: len(outcomes) == 3)
    client.close()


@pytest.mark.parametrize(
    ("no_sign", "is_ready"),
    [(None, True), (OverloadedError("full"), True), (ModelGoneError("gone"), False), (TimedOutError("late"), False)],
)
def test_a_level_is_ready_where_it_gives_a_sign(no_sign: Exception | None, is_ready: bool) -> None:
    client, script = level_client_of(dict)
    script.no_sign = no_sign
    assert client.is_ready("m") is is_ready
    client.close()


def test_requests_with_short_deadlines_find_out_that_a_level_hangs() -> None:
    """Each gets its answer in time; the level is judged by its own time."""
    release = threading.Event()

    def hang() -> dict[str, np.ndarray]:
        assert release.wait(120)
        return {"LOGITS": np.zeros((1, 2))}

    client, asked = level_client_of(hang, timeout_s=0.3, retry_s=60.0)
    outcomes: list[object] = []
    for number in range(3):
        client.submit(to("large", deadline=time.monotonic() + 0.02), outcomes.append)
        wait_for(lambda: len(outcomes) == number + 1)  # noqa: B023
        assert isinstance(outcomes[-1], OverloadedError) and "latency_ms ran out" in str(outcomes[-1])
    wait_for(lambda: exported(client)["failures"] >= 1)
    with pytest.raises(LevelGoneError, match="model large failed"):
        client.submit(to("large"), outcomes.append)
    assert asked.calls == len(outcomes) == 3
    release.set()
    client.close()


def test_a_requests_own_deadline_says_nothing_of_a_level() -> None:
    gate = threading.Event()

    def answer() -> dict[str, np.ndarray]:
        assert gate.wait(120)
        return {"LOGITS": np.zeros((1, 2))}

    client, _ = level_client_of(answer, timeout_s=60.0)
    outcomes: list[object] = []
    client.submit(to("large", deadline=time.monotonic() + 0.02), outcomes.append)
    wait_for(lambda: len(outcomes) == 1)
    assert isinstance(outcomes[0], OverloadedError)
    gate.set()
    wait_for(lambda: exported(client)["calls"] == 1)
    assert exported(client)["failures"] == 0 and len(outcomes) == 1
    client.close()


def test_calls_lost_to_a_hung_level_hold_nothing_back() -> None:
    """However many were lost, the level is called again once it answers."""
    release = threading.Event()

    def hang_or_answer() -> dict[str, np.ndarray]:
        assert release.wait(120)
        return {"LOGITS": np.zeros((1, 2))}

    client, asked = level_client_of(hang_or_answer, timeout_s=0.02, retry_s=1e-5)
    outcomes: list[object] = []

    def call() -> None:
        with contextlib.suppress(LevelGoneError):
            client.submit(to("large"), outcomes.append)
        time.sleep(0.001)

    while asked.calls < 100:
        call()
    wait_for(lambda: client.in_flight == 0)
    assert not any(isinstance(one, LevelResult) for one in outcomes)
    release.set()
    while not any(isinstance(one, LevelResult) for one in outcomes):
        call()
    client.close()


@pytest.mark.parametrize("no_sign", [ModelDiedError("died"), ModelGoneError("gone"), TimedOutError("no answer")])
def test_calls_end_where_their_level_gives_no_sign(no_sign: Exception) -> None:
    """However slow a level that gives signs is: with the default it has as long as its own queue may take, and more."""
    release = threading.Event()
    client, script = level_client_of(lambda: {"LOGITS": np.zeros((release.wait(60), 2))}, sign_period_s=0.01)
    outcomes: list[object] = []
    for _ in range(2):
        client.submit(to("large"), outcomes.append)
    wait_for(lambda: script.signs > 3)
    assert not outcomes
    script.no_sign = no_sign
    wait_for(lambda: len(outcomes) == 2)
    assert [type(one) for one in outcomes] == [LevelGoneError] * 2
    with pytest.raises(LevelGoneError, match="model large failed"):
        client.submit(to("large"), outcomes.append)
    release.set()
    client.close()


def test_a_level_may_let_texts_wait_as_long_as_its_own_bound() -> None:
    assert PolymorphSettings().max_queue_ms < TIMEOUT_S * 1e3


def test_closing_ends_calls_that_hang() -> None:
    release = threading.Event()
    client, _ = level_client_of(lambda: {"LOGITS": np.zeros((release.wait(60), 2))})
    outcomes: list[object] = []
    for _ in range(2):
        client.submit(to("large"), outcomes.append)
    client.close(timeout_s=0.05)
    assert [type(one) for one in outcomes] == [LevelGoneError] * 2
    release.set()


# On a clock of the test.


class Level:
    """A later level and its client. now: of the client's clocks, in seconds; gate: without it calls do not end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60.0) -> None:
        self.now = 100.0
        self.took_s, self.rows = 0.0, 1
        self.is_gone = False
        self.gate = threading.Event()
        self.gate.set()
        self.outcomes: list[Any] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now, sleep=time.sleep)
        monkeypatch.setattr(level_client, "time", clock)
        self.client, self.script = level_client_of(self._answer, timeout_s=timeout_s)

    def submit(self, model: str = "large", deadline: float | None = None) -> None:
        self.client.submit(to(model, self.rows, deadline), self.outcomes.append)

    def ask(self, model: str = "large", deadline: float | None = None) -> Any:
        """The outcome of one call."""
        before = len(self.outcomes)
        self.submit(model, deadline)
        wait_for(lambda: len(self.outcomes) > before)
        return self.outcomes[-1]

    def is_refused(self) -> bool:
        """Whether a call is refused, as the level failed lately."""
        try:
            self.submit()
        except LevelGoneError:
            return True
        return False

    def _answer(self) -> dict[str, np.ndarray]:
        assert self.gate.wait(120)
        if self.is_gone:
            raise ModelGoneError("not ready")
        self.now += self.took_s
        return {"LOGITS": np.zeros((self.rows, 2))}


def test_the_time_of_a_level_that_states_none_is_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    level = Level(monkeypatch)
    level.took_s, level.rows = 0.040, 2
    assert level.ask().engine_ms == pytest.approx([40.0, 40.0])
    assert exported(level.client) == {"calls": 1, "failures": 0, "timeouts": 0}
    level.client.close()


def test_the_wait_for_a_level_doubles_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    level = Level(monkeypatch)
    level.is_gone = True
    for wait_s in (1, 2, 4, 8, 16, 16):
        assert isinstance(level.ask(), LevelGoneError)
        level.now += wait_s - 0.01
        assert level.is_refused()
        level.now += 0.02
    assert exported(level.client) == {"calls": 0, "failures": 6, "timeouts": 0}
    level.is_gone = False
    assert isinstance(level.ask(), LevelResult)
    level.is_gone = True
    assert isinstance(level.ask(), LevelGoneError)
    level.now += 1.01
    assert not level.is_refused()
    level.client.close()


def test_one_call_alone_tests_a_level_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    level = Level(monkeypatch, timeout_s=60.0)
    level.is_gone = True
    level.ask()
    level.now += 1.01
    level.is_gone = False
    level.gate.clear()
    level.submit()
    assert [level.is_refused() for _ in range(3)] == [True] * 3
    level.gate.set()
    wait_for(lambda: len(level.outcomes) == 2)
    assert isinstance(level.outcomes[1], LevelResult)
    assert not level.is_refused()
    level.client.close()


def test_a_call_whose_time_is_over_leaves_the_test_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    level = Level(monkeypatch)
    level.is_gone = True
    level.ask()
    level.now += 1.01
    level.is_gone = False
    with pytest.raises(OverloadedError, match="latency_ms ran out before model large was called"):
        level.submit(deadline=level.now)
    assert isinstance(level.ask(), LevelResult)
    level.client.close()


def test_a_call_without_an_answer_in_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    level = Level(monkeypatch, timeout_s=0.02)
    level.gate.clear()
    assert "no answer in time" in str(level.ask())
    assert exported(level.client) == {"calls": 0, "failures": 1, "timeouts": 1}
    level.gate.set()
    level.client.close()
