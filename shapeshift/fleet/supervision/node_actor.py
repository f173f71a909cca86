"""The actor that supervises one node. Ray starts it again where it ends; it adopts the node that runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.files import replace_private, replace_text
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.supervision.node_supervisor import NodeStatus, NodeSupervisor
from shapeshift.fleet.supervision.plan import FleetPlan, NodePlan
from shapeshift.triton.keys import ensure_key


class NodeActor(NodeSupervisor):
    """Supervises one node on the machine on which Ray places it."""

    def __init__(self, plan: NodePlan, fleet: FleetPlan) -> None:
        write_private(plan.command.file.parent, plan.files)
        self._host = plan.host
        ensure_fleet_file(plan, fleet)
        super().__init__(plan.command, continues=_is_restarted())

    def describe(self) -> tuple[NodeStatus, str]:
        """The node's state, and its control key, which only the sidecar gets."""
        return self.status(), ensure_key(self.command().run_directory / "key")

    def host(self) -> str:
        """The address of its machine, as it was planned."""
        return self._host

    def pid(self) -> int:
        """The process of this actor."""
        return os.getpid()


def _is_restarted() -> bool:
    """Whether Ray has started this actor again, with what it was first started with."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def ensure_fleet_file(plan: NodePlan, fleet: FleetPlan) -> None:
    """Write the file that tells the node its addresses, unless it is there. One with others is replaced."""
    name, file = plan.node.name, plan.command.file
    with contextlib.suppress(ShapeshiftError):
        listed = {one.name: (one.grpc.address, one.metrics) for one in fleet_settings.read(file, name).nodes}
        if listed.get(name) == (plan.node.grpc.address, plan.node.metrics):
            return
    replace_text(file, fleet.fleet_file([name], name))


def write_private(folder: Path, contents: dict[str, bytes]) -> None:
    """Write files that only their owner can read."""
    for name, content in contents.items():
        replace_private(folder / name, content)
