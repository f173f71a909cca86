"""What `shapeshift sidecar status` shows of a fleet: rates a second, states, and what a node has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar import overview, run_files
from shapeshift.sidecar.servers import Servers
from shapeshift.triton.embedded.process_tracker import ProcessTracker
from shapeshift.triton.metrics import Samples
from tests.sidecar.fakes import FakeServer, cumulative, samples
from tests.sidecar.fleet import FakeFleet, single

WINDOW_S = 8.0
# More than Linux gives: there are no such processes.
PID = 4_194_304


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Front:
    """The page of a front that gets so many texts a second, and answers as many requests in 100 to 200 ms."""

    def __init__(self, clock: Clock, texts: float, answers: float, **more: Any) -> None:
        self.clock, self.texts, self.answers, self.more = clock, texts, answers, more
        self.others: Callable[[float], Samples] = lambda now: {}

    def __call__(self) -> Samples:
        now = self.clock.now - 50.0
        lengths, latencies = cumulative({32.0: self.texts * now}), cumulative({100.0: 0.0, 200.0: self.answers * now})
        return samples("enc", PID, 1 + now, lengths=lengths, latencies=latencies, **self.more) | self.others(now)


def shown(servers: Servers, folder: Path, clock: Clock) -> dict[str, Any]:
    return overview.overview(servers, folder, ProcessTracker(local=True), WINDOW_S, clock.sleep)


def test_rates_of_a_fleet_are_a_second_and_by_node(clock: Clock, tmp_path: Path) -> None:
    servers = {"a": FakeServer(), "b": FakeServer()}
    for server, loaded in zip(servers.values(), (("enc_w00", "enc_w01"), ("enc_w00",)), strict=True):
        server.add_front(models=2)
        for worker in loaded:
            server.load(worker)
    pages = {"a": Front(clock, 2.128, 1.0), "b": Front(clock, 3.0, 4.333)}
    found = shown(FakeFleet(servers, pages=pages, clock=clock).watched, tmp_path, clock)
    rows = {row["name"]: row for row in found["nodes"]}
    assert {name: (row["state"], row["workers"], row["texts_per_s"]) for name, row in rows.items()} == {
        "a": ("serving", 2, 2.13),
        "b": ("serving", 1, 3.0),
    }
    assert {row["version"] for row in rows.values()} == {"2.51.0"}
    (front,) = found["fronts"]
    assert (front["texts_per_s"], front["requests_per_s"], front["p98_ms"]) == (5.13, 5.33, 198.0)
    # Two processes, each on its node.
    assert front["pid"] is None
    assert [(one["name"], one["state"], one["pid"]) for one in front["models"]] == [
        ("a/enc", "serving", PID),
        ("b/enc", "serving", PID),
    ]
    assert front["workers"] == 3


def test_a_node_that_gives_no_version_is_shown_with_the_reason(clock: Clock, tmp_path: Path) -> None:
    server = FakeServer()
    server.add_front(models=1)

    def fail() -> str:
        raise ShapeshiftError("it is being restarted")

    pages = {name: Front(clock, 1.0, 1.0) for name in "ab"}
    fleet = FakeFleet({"a": server, "b": server}, pages=pages, clock=clock, versions={"b": fail})
    rows = {row["name"]: row for row in shown(fleet.watched, tmp_path, clock)["nodes"]}
    assert (rows["a"]["state"], rows["a"]["problem"]) == ("serving", "")
    assert (rows["b"]["state"], rows["b"]["version"]) == ("does not answer", None)
    assert "it is being restarted" in rows["b"]["problem"]


def test_a_front_without_answers_has_no_latency_and_a_single_one_has_a_process(clock: Clock, tmp_path: Path) -> None:
    server = FakeServer()
    server.add_front(models=0)
    (front,) = shown(single(server, Front(clock, 1.0, 0.0), clock), tmp_path, clock)["fronts"]
    assert (front["p98_ms"], front["requests_per_s"], front["pid"]) == (None, 0.0, PID)


def test_a_worker_says_what_it_does(clock: Clock, tmp_path: Path) -> None:
    """A process that is there and beats no more is silent; one that is gone is dead."""
    server = FakeServer()
    server.add_front(models=4)
    for worker in ("enc_w00", "enc_w01", "enc_w02"):
        server.load(worker)
    server.states["enc_w03"] = "LOADING"
    page = Front(clock, 1.0, 1.0, outstanding={"enc_w01": 4.0}, timeouts={"enc_w01": 2.0})
    page.others = lambda now: samples("enc_w00", 1, 7.0) | samples("enc_w01", PID + 1, 7.0)
    states = {row["name"]: row for row in shown(single(server, page, clock), tmp_path, clock)["workers"]}
    assert {name: (row["state"], row["pid"], row["bin"]) for name, row in states.items()} == {
        # No process of a model.
        "enc_w00": ("dead", 1, 512),
        "enc_w01": ("dead", PID + 1, 512),
        "enc_w02": ("no heartbeat", None, 512),
        "enc_w03": ("loading", None, None),
    }
    assert [(states[name]["outstanding"], states[name]["timeouts"]) for name in ("enc_w00", "enc_w01")] == [
        (0, 0),
        (4, 2),
    ]
    found = overview.overview(single(server, page, clock), tmp_path, ProcessTracker(local=False), WINDOW_S)
    assert [row["state"] for row in found["workers"][:2]] == ["silent", "silent"]


def test_other_models_are_shown_while_they_are_loaded(clock: Clock, tmp_path: Path) -> None:
    server = FakeServer()
    server.add_front(models=1)
    server.load("enc_w00")
    for name in ("plain", "leaving"):
        server.files[name] = server.loaded[name] = {"parameters": {}}
    server.states["leaving"] = "UNAVAILABLE"
    found = shown(single(server, Front(clock, 1.0, 1.0), clock), tmp_path, clock)
    assert found["models"] == [{"name": "plain", "state": "no heartbeat", "pid": None}]
    assert "leaving" in found["unloaded"] and "plain" not in found["unloaded"]
    run_files.OwedLoads(tmp_path / run_files.OWED_FILE).add("leaving", {})
    found = shown(single(server, Front(clock, 1.0, 1.0), clock), tmp_path, clock)
    assert "leaving" not in found["unloaded"], "the sidecar loads it again"


def test_the_last_five_decisions_and_the_plan_are_those_of_the_report(clock: Clock, tmp_path: Path) -> None:
    server = FakeServer()
    server.add_front(models=0)
    decisions = [{"number": number} for number in range(7)]
    run_files.write_report(tmp_path, {"decisions": decisions, "plans": {"enc": {"bins": [1]}}})
    found = shown(single(server, Front(clock, 1.0, 1.0), clock), tmp_path, clock)
    assert [one["number"] for one in found["sidecar"]["decisions"]] == [2, 3, 4, 5, 6]
    assert found["fronts"][0]["plan"] == {"bins": [1]}
