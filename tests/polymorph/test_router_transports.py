"""The transports of a router: which one carries a call, when workers are offered, how time is shared at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shapeshift.engines.interfaces import Ids
from shapeshift.errors import EngineError
from shapeshift.fleet.transport import FleetTransport
from shapeshift.polymorph.router import bls_transport
from shapeshift.polymorph.router.bls_transport import BlsTransport
from shapeshift.polymorph.router.transport import Exchange, Outputs, WorkerInfo
from tests.waiting import wait_for

INFO = WorkerInfo(0, 0, 7)
FOREVER = 1e9


class FakeTransport:
    """Notes what it is asked. takes_s: for how long it closes."""

    def __init__(self, clock: Any, takes_s: float = 0.0, timeouts: int = 0) -> None:
        self.started: list[str] = []
        self.closed: list[float] = []
        self.served = 0
        self.timeouts = timeouts
        self._clock, self._takes_s = clock, takes_s

        self.answers = {"b": {"front_w01", "front", "front_w00"}, "a": {"other_w00", "front_w00", "front_x"}}

    def workers(self) -> list[str]:
        return ["front_w00"]

    def serve(self) -> None:
        self.served += 1

    def start(self, exchange: Exchange) -> None:
        self.started.append(exchange.worker)

    def is_exhausted(self, worker: str) -> bool:
        return worker == "front_w00"

    def close(self, timeout_s: float) -> None:
        self.closed.append(timeout_s)
        self._clock.now += self._takes_s


class Fleet:
    def __init__(self, poll_s: float = 0.0, remote_s: float = 0.0) -> None:
        self.now = 100.0
        self.own, self.remote = FakeTransport(self, timeouts=3), FakeTransport(self, remote_s, timeouts=40)
        self.poll = FakeTransport(self, poll_s)
        remote, poll = cast(Any, self.remote), cast(Any, self.poll)
        self.transport = FleetTransport(self.own, remote, poll, "front", lambda: self.now)


def exchange(worker: str, texts: Sequence[Ids] | None = (), **noted: Any) -> Exchange:
    none: list[Any] = []
    answered, ended = noted.get("answered", none), noted.get("ended", none)
    return Exchange(worker, FOREVER, lambda: texts, lambda outputs, ms: answered.append((outputs, ms)), ended.append)


def test_workers_of_this_front_on_other_nodes_are_offered_behind_the_own_ones() -> None:
    found = Fleet().transport.workers()
    assert list(found) == ["front_w00", "b/front_w00", "b/front_w01", "a/front_w00"]


def test_a_call_to_another_node_goes_there_and_any_other_stays() -> None:
    fleet = Fleet()
    for worker in ("front_w00", "a/front_w00"):
        fleet.transport.start(exchange(worker))
    assert (fleet.own.started, fleet.remote.started) == (["front_w00"], ["a/front_w00"])
    assert [fleet.transport.is_exhausted(worker) for worker in ("front_w00", "front_w01")] == [True, False]
    assert fleet.transport.timeouts == 43
    fleet.transport.serve()
    assert (fleet.own.served, fleet.remote.served) == (1, 0)


@pytest.mark.parametrize(
    ("poll_s", "remote_s", "closed"),
    [(0.0, 0.0, (5.0, 5.0, 5.0)), (1.5, 2.0, (5.0, 3.5, 1.5)), (9.0, 1.0, (5.0, 0.0, 0.0))],
)
def test_what_the_first_one_takes_to_close_the_next_one_lacks(
    poll_s: float, remote_s: float, closed: tuple[float, ...]
) -> None:
    fleet = Fleet(poll_s, remote_s)
    fleet.transport.close(5.0)
    assert (*fleet.poll.closed, *fleet.remote.closed, *fleet.own.closed) == closed


# Calls to the own server.


class Client:
    """Answers at once, after `takes_s` of the clock. asked: the workers and how many texts."""

    def __init__(self, clock: Any) -> None:
        self.asked: list[tuple[str, int]] = []
        self.fails: Exception | None = None
        self._clock = clock

    def call(self, worker: str, texts: Sequence[Ids]) -> tuple[Outputs, WorkerInfo]:
        self.asked.append((worker, len(texts)))
        self._clock.now += 0.25
        if self.fails is not None:
            raise self.fails
        return {"A": np.ones((len(texts), 1))}, INFO


class Own:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr(bls_transport, "time", clock)
        self.client = Client(self)
        self.transport = BlsTransport(self.client.call, ["a", "b"], settled_s=3.0)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    made = Own(monkeypatch)
    yield made
    made.transport.close(5.0)


@pytest.mark.parametrize(("later_s", "offered"), [(2.9, []), (3.0, ["a", "b"]), (4.0, ["a", "b"])])
def test_workers_are_offered_once_the_server_must_have_noted_this_process(
    own: Own, later_s: float, offered: list[str]
) -> None:
    own.now += later_s
    assert list(own.transport.workers()) == offered


def test_a_request_shows_that_the_server_has_noted_it(own: Own) -> None:
    assert not own.transport.workers()
    own.transport.serve()
    assert list(own.transport.workers()) == ["a", "b"]


def test_an_answer_comes_with_its_milliseconds_and_then_the_report(own: Own) -> None:
    answered: list[Any] = []
    ended: list[Any] = []
    own.transport.start(exchange("a", [np.ones(2, np.int64)], answered=answered, ended=ended))
    wait_for(lambda: ended)
    ((outputs, took_ms),) = answered
    assert (outputs["A"].tolist(), took_ms, ended) == ([[1.0]], 250.0, [INFO])
    assert own.client.asked == [("a", 1)]


def test_a_call_that_is_not_needed_any_more_is_not_made(own: Own) -> None:
    answered: list[Any] = []
    ended: list[Any] = []
    own.transport.start(exchange("a", None, answered=answered, ended=ended))
    wait_for(lambda: ended)
    assert (ended, answered, own.client.asked) == ([None], [], [])


def test_a_failure_is_the_end_and_no_answer(own: Own) -> None:
    own.client.fails = EngineError("out of luck")
    answered: list[Any] = []
    ended: list[Any] = []
    own.transport.start(exchange("b", [], answered=answered, ended=ended))
    wait_for(lambda: ended)
    assert (ended, answered) == ([own.client.fails], [])


@pytest.mark.parametrize(("abandoned", "exhausted"), [(199, False), (200, True), (201, True)])
def test_a_worker_that_holds_too_many_threads_gets_no_further_call(
    own: Own, monkeypatch: pytest.MonkeyPatch, abandoned: int, exhausted: bool
) -> None:
    monkeypatch.setattr(own.transport.pool, "abandoned", lambda worker: abandoned if worker == "a" else 0)
    assert (own.transport.is_exhausted("a"), own.transport.is_exhausted("b")) == (exhausted, False)
