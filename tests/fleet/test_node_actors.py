"""What the fleet's actor knows of the nodes when Ray has started it again, with a fake Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shapeshift.fleet.settings import RaySettings
from shapeshift.fleet.supervision.actors import NodeActors
from shapeshift.fleet.supervision.node_process import LOAD, OPERATOR
from shapeshift.fleet.supervision.node_supervisor import NodeStatus
from shapeshift.fleet.supervision.plan import FleetPlan
from shapeshift.triton.endpoint import Tls

TLS = Tls(Path("ca.pem"), Path("a.pem"), Path("a.key"))
PLAN = FleetPlan("demo", Path("/srv"), RaySettings(nodes=1, max_nodes=4), (), TLS)


class FakeRay:
    """Knows the actors of `hosts`, by name; one whose host is empty does not answer."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, **hosts: str) -> None:
        self.hosts = {name.replace("_", "-"): host for name, host in hosts.items()}

    def get_actor(self, name: str) -> Any:
        if name not in self.hosts:
            raise ValueError(name)
        return SimpleNamespace(host=SimpleNamespace(remote=lambda: self.hosts[name]))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": host, "Alive": True} for host in self.hosts.values()]

    def get(self, answer: str, timeout: float) -> str:
        if not answer:
            raise self.exceptions.RayError
        return answer


def actors(ray: FakeRay) -> NodeActors:
    """As at the first start, with node-0 and node-1."""
    plan = PLAN.with_node("node-0", "10.0.0.1").with_node("node-1", "10.0.0.2")
    return NodeActors(ray, plan, dict.fromkeys(("node-0", "node-1"), object()))


@pytest.mark.parametrize(
    "hosts",
    [
        {"node_0": "10.0.0.1", "node_1": "10.0.0.2", "node_2": "10.0.0.3", "node_3": "10.0.0.4"},
        {"node_0": "10.0.0.1", "node_1": "10.0.0.2"},
        {"node_0": "10.0.0.1"},
    ],
    ids=["added", "same", "taken-away"],
)
def test_the_nodes_are_those_that_ray_has(hosts: dict[str, str]) -> None:
    ray = FakeRay(**hosts)
    found = actors(ray)
    assert found.find()
    assert found.plan.hosts == ray.hosts
    assert list(found.names()) == list(ray.hosts)


def status_of(ray: FakeRay, **states: NodeStatus) -> NodeActors:
    """The actors of node-0 and node-1, whose supervisors have told these states."""
    found = actors(ray)
    found.answers = {name.replace("_", "-"): (state, "key") for name, state in states.items()}
    return found


def test_a_new_actor_learns_from_the_nodes_which_one_is_leaving() -> None:
    ray = FakeRay(node_0="10.0.0.1", node_1="10.0.0.2")
    ready = NodeStatus("ready")
    assert status_of(ray, node_0=ready, node_1=ready).leaving() == ""
    assert status_of(ray, node_0=ready, node_1=NodeStatus("stopped", drained_for=OPERATOR)).leaving() == ""
    found = status_of(ray, node_0=ready, node_1=NodeStatus("leaving", drained_for=LOAD))
    assert found.leaving() == "node-1" and not found.is_stopped("node-1")
    ray.hosts["node-1"] = "10.0.0.9"
    assert found.is_stopped("node-1"), "its machine has gone"


def test_nodes_serve_where_all_have_said_so() -> None:
    ray = FakeRay(node_0="10.0.0.1", node_1="10.0.0.2")
    ready = NodeStatus("ready")
    assert status_of(ray, node_0=ready, node_1=ready).are_serving()
    assert not status_of(ray, node_0=ready).are_serving()
    assert not status_of(ray, node_0=ready, node_1=NodeStatus("starting")).are_serving()


def test_a_node_whose_machine_is_away_is_asked_for_again() -> None:
    ray = FakeRay(node_0="10.0.0.1", node_1="10.0.0.2", node_2="")
    found = actors(ray)
    assert not found.find()
    ray.hosts["node-2"] = "10.0.0.3"
    assert found.find()
    assert found.plan.hosts == ray.hosts
