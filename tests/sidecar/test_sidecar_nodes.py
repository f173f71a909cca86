"""The nodes that the sidecar sees: connections, presence, and what holds for each node alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shapeshift.fleet.node import Members, Node
from shapeshift.fleet.sidecar.connections import FleetConnections, NodeServer
from shapeshift.fleet.sidecar.node_calls import NodeCalls, Presence
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.health_loop import HealthLoop
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage, listed, timeouts_in_a_row
from shapeshift.sidecar.policy.spare import in_order
from shapeshift.triton.embedded.process_tracker import ProcessTracker
from shapeshift.triton.endpoint import Endpoint
from shapeshift.triton.metrics import Samples
from tests.fakes import logger
from tests.sidecar.fakes import FakeServer, front, samples
from tests.sidecar.fleet import FakeFleet, no_page
from tests.waiting import wait_for

# No process has this pid.
NO_PID = 4_194_304


def quiet(log: list[str] | None = None) -> Journal:
    return Journal(logger(log), lambda values: None, {})


def test_late_and_failing_nodes_are_named_and_hold_up_no_other() -> None:
    never = threading.Event()
    calls: NodeCalls[int] = NodeCalls(0.1)
    given = {"a": lambda: 1, "b": lambda: int(never.wait()), "c": lambda: int("x")}
    answers, problems = calls.ask(given)
    assert answers == {"a": 1}
    assert problems["b"] == "no answer within 0.1 s"
    assert "invalid literal" in problems["c"]
    answers, problems = calls.ask({"a": lambda: 2, "b": lambda: 3})
    assert answers == {"a": 2}
    assert problems["b"] == "its last answer is still missing"
    never.set()
    while "b" not in answers:
        # What it answered too late is dropped.
        answers, _ = calls.ask({"b": lambda: 3})
    assert answers == {"b": 3}


def test_a_node_is_gone_after_two_missing_answers_and_back_after_two() -> None:
    log: list[str] = []
    presence = Presence(quiet(log))
    states = []
    for answers in (True, False, True, False, False, True, True, True):
        presence.record("metrics", ["a", "b"] if answers else ["a"], {} if answers else {"b": "no answer"})
        presence.record("models", ["a", "b"], {})
        states.append(presence.gone == {"b"})
    assert states == [False, False, False, False, True, True, False, False]
    assert log == [
        "node b: does not answer, and is planned around: no answer",
        "node b: answers again",
    ]


def test_a_node_must_answer_both_questions() -> None:
    presence = Presence(quiet())
    for _ in range(2):
        presence.record("metrics", ["a", "b"], {})
        presence.record("models", ["a"], {"b": "cut off"})
    assert presence.gone == {"b"}
    presence.record("metrics", ["a"], {})
    assert presence.gone == frozenset()


class Listed:
    def __init__(self, *nodes: Node) -> None:
        self.nodes = Members(nodes)

    def members(self) -> Members:
        return self.nodes

    def close(self) -> None:
        pass


def node(name: str, port: int, key_file: Path | None = None) -> Node:
    return Node(name, Endpoint(f"10.0.0.1:{port}"), f"http://10.0.0.1:{port}/metrics", key_file)


def test_connections_follow_the_members(tmp_path: Path) -> None:
    log: list[str] = []
    made: list[tuple[str, str]] = []

    def connect(one: Node, key: str, host: int) -> NodeServer:
        made.append((one.name, key))
        return NodeServer(FakeServer(), no_page, lambda: "", host)

    members = Listed(node("a", 1), node("b", 2, tmp_path / "key"))
    connections = FleetConnections(members, quiet(log), connect)
    connections.refresh()
    connections.refresh()
    assert connections.servers.keys() == {"a"}
    assert [line for line in log if "members b: left out: " in line and str(tmp_path / "key") in line]
    assert len(log) == 1
    (tmp_path / "key").write_text("0" * 32)
    (tmp_path / "key").chmod(0o600)
    connections.refresh()
    connections.refresh()
    assert made == [("a", ""), ("b", "0" * 32)]
    (tmp_path / "key").write_text("1" * 32)
    members.nodes = Members([node("a", 3), members.nodes.nodes[1]], "the file cannot be read")
    connections.refresh()
    assert made[2:] == [("a", ""), ("b", "1" * 32)]
    assert {server.host for server in connections.servers.values()} == {1, 2}
    assert "members fleet: the file cannot be read" in log[-1]
    members.nodes = Members([node("a", 3)])
    connections.refresh()
    assert connections.servers.keys() == {"a"}


def test_of_two_nodes_with_one_name_neither_is_connected_to_and_the_rest_is() -> None:
    log: list[str] = []
    members = Listed(node("a", 1), node("b", 2), node("b", 3))
    connections = FleetConnections(members, quiet(log), lambda one, key, host: NodeServer(FakeServer(), no_page, str))
    connections.refresh()
    connections.refresh()
    assert connections.servers.keys() == {"a"}
    (line,) = log
    assert "members b: left out: nodes at 10.0.0.1:2, 10.0.0.1:3 have it; none of them is used" in line
    members.nodes = Members([node("a", 1), node("b", 3)])
    connections.refresh()
    assert connections.servers.keys() == {"a", "b"}


def test_processes_of_different_machines_have_different_numbers() -> None:
    own, other = MetricsPage(samples("enc", 12, 1.0), 0.0, "a", 0), MetricsPage(samples("enc", 12, 2.0), 0.0, "b", 1)
    found = MetricsPage.joined([own, other], 0.0, frozenset("ab")).heartbeats()
    assert found["a/enc"] == {12: 1.0}
    (number,) = found["b/enc"]
    assert number != 12
    assert listed([number]) == "process 12"


def test_workers_without_a_node_are_those_of_the_front() -> None:
    page = MetricsPage(samples("enc", 1, 1.0, timeouts={"enc_w00": 2.0, "b/enc_w00": 3.0}), 0.0, "a")
    assert {series.label for series in page.models["a/enc"]} == {"", "a/enc_w00", "b/enc_w00"}


def test_a_front_that_cannot_reach_a_node_says_nothing_about_its_workers() -> None:
    def counted(**counts: float) -> dict[str, int]:
        named = {f"{key[0]}/enc_w0{key[1]}": value for key, value in counts.items()}
        page = MetricsPage(samples("enc", 1, 1.0, timeouts=named), 0.0, "a")
        return timeouts_in_a_row(page, {1})

    assert counted(a0=2.0, b0=3.0, b1=4.0) == {"a/enc_w00": 2}
    assert counted(a0=2.0, b0=3.0, b1=0.0) == {"a/enc_w00": 2, "b/enc_w00": 3, "b/enc_w01": 0}


class HealthCase:
    """A health loop over the nodes a and b, each with a front and workers whose processes are on other machines."""

    def __init__(self, workers_of_b: int = 1) -> None:
        self.servers = {name: FakeServer() for name in "ab"}
        self.workers = {"a": ["enc_w00"], "b": [f"enc_w0{number}" for number in range(workers_of_b)]}
        for name, server in self.servers.items():
            server.add_front()
            for worker in self.workers[name]:
                server.load(worker)
            server.calls.clear()
        self.beats, self.dead, self.log = 0.0, set[str](), list[str]()
        pages = {"a": lambda: self.scrape("a"), "b": lambda: self.scrape("b")}
        self.fleet = FakeFleet(self.servers, self.log, pages)
        journal = quiet(self.log)
        self.actuator = Actuator(self.fleet.control, (), journal, lambda: "")
        self.loop = HealthLoop(
            self.fleet.scrape, self.fleet.control, self.actuator, journal, ProcessTracker(local=False)
        )

    def scrape(self, name: str) -> Samples:
        self.servers[name].require_up()
        found: Samples = {}
        for number, model in enumerate(("enc", *self.workers[name])):
            found |= samples(model, NO_PID + number, 1.0 if f"{name}/{model}" in self.dead else self.beats)
        return found

    def scrapes(self, count: int) -> None:
        for _ in range(count):
            self.beats += 1.0
            self.loop.step()

    def settle(self) -> None:
        wait_for(lambda: not self.loop.pending)

    def logged(self, text: str) -> int:
        return sum(text in line for line in self.log)


def test_a_dead_worker_is_reloaded_on_its_node() -> None:
    case = HealthCase()
    case.dead = {"b/enc_w00"}
    case.scrapes(7)
    case.settle()
    assert case.servers["a"].calls == []
    assert case.servers["b"].calls == [("load", "enc_w00", "512")]
    assert case.logged(f"health b/enc_w00: no heartbeat of process {NO_PID + 1} in 6 scrapes") == 1


def test_models_of_a_node_that_does_not_answer_are_not_reloaded() -> None:
    case = HealthCase()
    case.scrapes(2)
    case.servers["b"].down = True
    case.scrapes(40)
    case.servers["b"].down = False
    case.scrapes(4)
    case.settle()
    assert case.servers["b"].calls == []
    assert case.logged("health ") == 0


def test_loads_that_hang_on_one_node_hold_up_no_other() -> None:
    never = threading.Event()
    case = HealthCase(workers_of_b=5)
    on_b = {f"b/{worker}" for worker in case.workers["b"]}
    case.servers["b"].fails = lambda name, bin_: "ended" if never.wait(60) else None
    case.dead = set(on_b)
    case.scrapes(7)
    assert case.loop.pending == on_b
    case.dead |= {"a/enc_w00"}
    case.scrapes(7)
    wait_for(lambda: case.loop.pending == on_b)
    assert case.servers["a"].calls == [("load", "enc_w00", "512")]
    never.set()
    case.settle()
    assert case.logged("not loaded: ") == 5


def test_spare_workers_fill_the_nodes_evenly() -> None:
    models = [f"{name}/enc_w0{number}" for name, count in (("a", 4), ("b", 2)) for number in range(count)]
    assert [model[0] for model in in_order(models, ())] == ["a", "b", "a", "a", "b", "a"]
    assert in_order(models[2:], models[:2])[0] == "b/enc_w00"


@pytest.mark.parametrize("name", ["a/enc_w00", "enc_w00"])
def test_a_qualified_worker_has_a_number(name: str) -> None:
    assert front().worker_number(name) == 0
