"""Nodes follow the workers that are wanted, on a cluster with an autoscaler. A program stands for each node."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.policy.node_count import WorkerDemand
from shapeshift.fleet.sidecar import demands
from shapeshift.fleet.supervision import plan
from shapeshift.fleet.supervision.fleet_actor import FLEET_ACTOR, NODES_LOG
from shapeshift.fleet.supervision.node_process import NodeCommand
from shapeshift.fleet.supervision.plan import SIDECAR
from shapeshift.fleet.supervision.ray_fleet import RayFleet
from tests import waiting
from tests.fleet.autoscaled_ray import autoscaled_ray
from tests.fleet.stub_program import stub_program

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
FLEET = """
name = "demo"

[ray]
address = "{address}"
max_nodes = 3
grpc_port = {port}
"""
wait_for = partial(waiting.wait_for, timeout_s=180, pause_s=0.5)


@pytest.fixture
def fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[int], list[int]]
) -> Iterator[RayFleet]:
    """A fleet of one node that is up, on a cluster that may have two machines beside its head."""
    monkeypatch.setattr(plan, "NodeCommand", partial(NodeCommand, python=stub_program(tmp_path)))
    with autoscaled_ray(tmp_path, most_machines=2) as address:
        port = free_ports(1)[0]
        file = tmp_path / "fleet.toml"
        file.write_text(FLEET.format(address=address, port=port))
        found = RayFleet(file)
        found.up(None)
        try:
            yield found
        finally:
            found.down(60.0, lambda text: None)


def test_machines_come_with_the_load_and_go_after_their_node(fleet: RayFleet) -> None:
    import ray

    def machines() -> int:
        return sum(bool(one["Alive"]) for one in ray.nodes())

    def ready(names: list[str]) -> bool:
        # While the fleet's actor is started again, nobody knows the nodes.
        with contextlib.suppress(ShapeshiftError):
            return fleet.names == names and _ready(names)
        return False

    def _ready(names: list[str]) -> bool:
        found = fleet.statuses(names)
        return all(name in found and found[name].state == "ready" for name in names)

    def log() -> str:
        file = fleet.home / SIDECAR / NODES_LOG
        return file.read_text() if file.is_file() else ""

    demand = fleet.home / SIDECAR / "fleet" / "demo" / demands.DEMAND_FILE
    demand.parent.mkdir(parents=True)
    wait_for(lambda: ready(["node-0"]))
    assert machines() == 1
    demands.write(demand, {"encode": WorkerDemand(9, 4)})
    wait_for(lambda: ready(["node-0", "node-1", "node-2"]))
    assert machines() == 3
    assert "node-1: no machine has room; Ray's autoscaler was asked for 3 nodes" in log()
    # `up` finds what was added.
    fleet.up(None)
    assert fleet.names == ["node-0", "node-1", "node-2"]
    before = fleet.actor_pid(FLEET_ACTOR)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: ready(["node-0", "node-1", "node-2"]))
    assert fleet.actor_pid(FLEET_ACTOR) != before
    demands.write(demand, {"encode": WorkerDemand(8, 4)})
    wait_for(lambda: "node-2: drained" in log())
    assert machines() == 3, "the machine waits for the requests of its node"
    # The next actor goes on with it.
    with contextlib.suppress(ShapeshiftError):
        os.kill(fleet.actor_pid(FLEET_ACTOR), signal.SIGKILL)
    wait_for(lambda: machines() == 2)
    assert "node-2: has ended its requests and is gone" in log()
    assert ready(["node-0", "node-1"])
