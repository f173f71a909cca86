"""Judging foreign models: with processes that look like theirs, and hand-made counts of the server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shapeshift.sidecar.health import DeadModel, ReloadBackoff
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import DONE, PENDING, MetricsPage
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.sidecar.watch_all import LOOKS, WatchAll
from shapeshift.triton.metrics import Samples
from tests.fakes import logger
from tests.sidecar.fakes import FakeServer, samples
from tests.sidecar.fleet import single
from tests.sidecar.stubs import Stubs

HANG_S = 5.0


class Case:
    """A watch over the model `m`, of which this process plays the server; a look each second."""

    def __init__(self, port: int | None, **settings: Any) -> None:
        self.server = FakeServer()
        self.load("m")
        self.log: list[str] = []
        self.now, self.pending, self.done = 0.0, 0.0, 0.0
        self.more: Samples = {}
        self.backoff = ReloadBackoff()
        changed = SidecarSettings(watch_all=True, hang_seconds=HANG_S, **settings)
        journal = Journal(logger(self.log), lambda values: None, {})
        self.watch = WatchAll(changed, single(self.server).control, self.backoff, journal, port, lambda: self.now)

    def load(self, name: str, backend: str = "python", count: int = 1) -> None:
        groups = [{"name": f"{name}_0", "count": count}]
        self.server.loaded[name] = {"name": name, "backend": backend, "parameters": {}, "instance_group": groups}

    def look(self, times: int = 1, changing: tuple[str, ...] = (), seconds: float = 1.0) -> dict[str, DeadModel]:
        dead = {}
        for _ in range(times):
            self.now += seconds
            own = frozenset({("model", "m"), ("version", "1")})
            counts = {(PENDING, own): self.pending, (DONE[0], own): self.done, (DONE[1], own): 0.0}
            dead = self.watch.dead(MetricsPage({**counts, **self.more}, self.now), changing)
        return dead


@pytest.fixture
def port() -> Iterator[int]:
    """Of a socket on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_an_ended_process_is_dead_after_some_looks(port: int, stubs: Stubs) -> None:
    case = Case(port)
    process = stubs.start("m_0_0")
    assert case.look(2 * LOOKS) == {}
    process.kill()
    process.wait()
    assert case.look(LOOKS - 1) == {}
    assert case.look() == {"m": DeadModel("the process of m_0_0 has ended", True)}


def test_a_suspended_process_is_dead_and_is_to_be_killed(port: int, stubs: Stubs) -> None:
    case = Case(port)
    process = stubs.start("m_0_0")
    process.send_signal(signal.SIGSTOP)
    assert case.look(LOOKS) == {"m": DeadModel("its process is suspended (SIGSTOP)", True, suspended=(process.pid,))}


def test_fewer_instances_by_model_control_are_no_death(port: int, stubs: Stubs) -> None:
    case = Case(port)
    case.load("m", count=2)
    processes = [stubs.start("m_0_0"), stubs.start("m_0_1")]
    case.look()
    case.load("m", count=1)
    processes[0].kill()
    processes[0].wait()
    assert case.look(2 * LOOKS) == {}


def test_the_processes_of_another_server_say_nothing(stubs: Stubs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    case = Case(port)
    stubs.start("m_0_0").send_signal(signal.SIGSTOP)
    assert case.look(2 * LOOKS) == {}
    assert sum("its processes are not visible here" in line for line in case.log) == 1


def test_a_model_hangs_if_requests_wait_and_none_ends() -> None:
    case = Case(None)
    case.look()
    case.pending = 2
    assert case.look(int(HANG_S) - 1) == {}
    assert case.look() == {"m": DeadModel("requests wait, and none has ended for 5 s", False)}


def test_a_model_whose_requests_end_does_not_hang() -> None:
    case = Case(None)
    case.look()
    case.pending = 2
    for _ in range(4):
        assert case.look(int(HANG_S) - 1) == {}
        case.done += 1


def test_a_sidecar_that_was_delayed_takes_no_model_for_hung() -> None:
    case = Case(None)
    case.look()
    case.pending = 2
    assert case.look(seconds=1000.0) == {}


def test_requests_that_a_hung_model_has_left_in_the_counts_hang_no_model() -> None:
    """The server goes on to count those whose client has gone, after the reload too."""
    case = Case(None)
    case.look()
    case.pending = 3
    assert case.look(int(HANG_S))
    assert case.look(changing=("m",)) == {}
    assert case.look(2 * int(HANG_S)) == {}
    case.pending = 4
    assert case.look(int(HANG_S))


def test_models_with_a_heartbeat_of_other_backends_and_spared_ones_are_not_judged() -> None:
    for more, backend, spared in (
        (samples("m", 1, 5.0), "python", ()),
        ({}, "onnxruntime", ()),
        ({}, "python", ("m",)),
    ):
        case = Case(None, spared=spared)
        case.load("m", backend)
        case.more = more
        case.look()
        case.pending = 2
        assert case.look(2 * int(HANG_S)) == {}


def test_a_model_is_left_alone_until_it_has_lived_for_a_while() -> None:
    case = Case(None, most_reloads=2)
    case.look()
    case.pending = 2
    case.look(int(HANG_S) - 1)
    for _ in range(2):
        assert case.look()
        case.backoff.record("m", case.now)
    assert case.look(300) == {}
    assert sum("left alone after 2 reloads in a row" in line for line in case.log) == 1
    case.done += 1
    case.look()
    assert case.look(int(HANG_S))
