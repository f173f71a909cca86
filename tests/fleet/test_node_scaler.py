"""How many nodes a fleet has: as many as hold the workers that are wanted."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from shapeshift.fleet.policy.node_count import NodeLimits, WorkerDemand, decide, needed_nodes
from shapeshift.fleet.sidecar import demands
from shapeshift.fleet.supervision.actors import NodeActors
from shapeshift.fleet.supervision.fleet_actor import NodeScaler

LIMITS = NodeLimits(1, 4)


class FakeNodes:
    """Nodes in memory. machines: how many there are, each with room for one node; calls: in their order; drained: for
    the load; away: nodes that take no requests."""

    def __init__(self, nodes: int, machines: int) -> None:
        self.present = [f"node-{number}" for number in range(nodes)]
        self.machines = machines
        self.stopped: set[str] = set()
        self.away: set[str] = set()
        self.drained = ""
        self.calls: list[str] = []

    def names(self) -> list[str]:
        return self.present

    def request(self, nodes: int) -> None:
        self.calls.append(f"request {nodes}")

    def start(self, name: str) -> bool:
        if len(self.present) == self.machines:
            return False
        self.calls.append(f"start {name}")
        self.present.append(name)
        return True

    def are_serving(self) -> bool:
        return not self.away and not self.drained

    def drain(self, name: str) -> None:
        self.calls.append(f"drain {name}")
        self.drained = name

    def leaving(self) -> str:
        return self.drained

    def is_stopped(self, name: str) -> bool:
        return name in self.stopped

    def remove(self, name: str) -> None:
        self.calls.append(f"remove {name}")
        self.drained = ""
        self.present.remove(name)


class Case:
    """A scaler with fake nodes and a fake clock."""

    def __init__(self, nodes: int, machines: int, limits: NodeLimits = LIMITS) -> None:
        self.nodes = FakeNodes(nodes, machines)
        self.now = 1000.0
        self.log: list[str] = []
        self.limits = limits
        self.begin()

    def begin(self) -> None:
        """A scaler that knows nothing of the last one."""
        self.scaler = NodeScaler(cast(NodeActors, self.nodes), self.limits, self.log.append, lambda: self.now)

    def steps(self, seconds: int, workers: int | None, per_node: int = 4) -> list[str]:
        """The calls of so many seconds in which the front wants `workers`."""
        self.nodes.calls.clear()
        for _ in range(seconds):
            self.scaler.step({} if workers is None else {"enc": WorkerDemand(workers, per_node)})
            self.now += 1.0
        return self.nodes.calls


def test_the_nodes_hold_the_workers_of_the_front_that_needs_most() -> None:
    assert needed_nodes([WorkerDemand(8, 4), WorkerDemand(3, 1)]) == 3
    assert needed_nodes([WorkerDemand(9, 4)]) == 3
    assert needed_nodes([]) == 0


def test_all_needed_nodes_are_added_at_once_and_one_is_taken_away_after_a_minute() -> None:
    assert decide(4, 2, 0.0, LIMITS) == 4
    assert decide(9, 2, 0.0, LIMITS) == 4
    assert decide(1, 3, 59.0, LIMITS) == 3
    assert decide(1, 3, 60.0, LIMITS) == 2
    assert decide(1, 3, 60.0, NodeLimits(3, 4)) == 3
    assert decide(0, 3, 600.0, LIMITS) == 3, "nothing is known"
    assert decide(0, 5, 0.0, LIMITS) == 4 and decide(0, 1, 0.0, NodeLimits(2, 4)) == 2


def test_nodes_are_added_as_machines_come() -> None:
    case = Case(nodes=1, machines=1)
    assert case.steps(3, 4) == ["request 1"]
    assert case.steps(5, 9) == ["request 3"]
    assert case.log == ["node-1: no machine has room; Ray's autoscaler was asked for 3 nodes"]
    case.nodes.machines = 3
    assert case.steps(5, 9) == ["start node-1", "start node-2"]
    assert case.log[-1] == "node-2: started, 3 nodes are needed: enc wants 9 workers, 4 a node"
    assert case.steps(300, 9) == []


def test_a_node_ends_its_requests_before_its_machine_is_given_back() -> None:
    case = Case(nodes=3, machines=3)
    assert case.steps(59, 4) == ["request 3"]
    assert case.steps(30, 4) == ["drain node-2"]
    # Meanwhile nothing else is done, not even more nodes.
    assert case.steps(30, 12) == []
    case.nodes.stopped.add("node-2")
    assert case.steps(1, 4) == ["remove node-2", "request 2"]
    assert case.steps(59, 4) == []
    assert case.steps(1, 4) == ["drain node-1"]


def test_the_next_scaler_goes_on_with_a_node_that_is_leaving() -> None:
    case = Case(nodes=3, machines=3)
    case.steps(61, 4)
    case.begin()
    assert case.steps(30, 12) == [], "it is not counted as one of three"
    case.nodes.stopped.add("node-2")
    assert case.steps(1, 12) == ["remove node-2", "request 3", "start node-2"]


def test_no_node_goes_while_another_one_does_not_serve() -> None:
    case = Case(nodes=3, machines=3)
    case.nodes.away.add("node-0")
    assert case.steps(300, 8) == ["request 3"]
    case.nodes.away.clear()
    assert case.steps(60, 8) == []
    assert case.steps(1, 8) == ["drain node-2"]


def test_the_log_says_who_wants_what() -> None:
    case = Case(nodes=1, machines=2)
    case.steps(1, 2, per_node=1)
    assert case.log == ["node-1: started, 2 nodes are needed: enc wants 2 nodes"]


def test_a_wish_that_comes_and_goes_takes_no_node_away() -> None:
    case = Case(nodes=2, machines=2)
    for _ in range(10):
        case.steps(50, 4)
        assert case.steps(1, 5) == []
    assert case.steps(300, None) == []


def test_a_wish_that_ends_takes_the_request_back() -> None:
    case = Case(nodes=1, machines=1)
    case.steps(2, 9)
    assert case.steps(2, 4) == ["request 1"]


def test_a_damaged_demand_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "demand.json"
    assert demands.read(file) == {}
    demands.write(file, {"enc": WorkerDemand(9, 4)})
    assert demands.read(file) == {"enc": WorkerDemand(9, 4)}
    for text in ("{", "[]", "3", '{"enc": 3}', '{"enc": [1, "x"]}', '{"enc": [1, 0]}', '{"enc": [-1, 2]}'):
        file.write_text(text)
        assert demands.read(file) == {}, text
