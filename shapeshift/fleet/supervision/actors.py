"""Ray, as a fleet uses it: its machines, and the actors of the nodes: one supervises each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.errors import ShapeshiftError
from shapeshift.files import replace_private, replace_text
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.settings import RaySettings
from shapeshift.fleet.supervision import plan as plans
from shapeshift.fleet.supervision.node_process import kept_here
from shapeshift.fleet.supervision.node_supervisor import NodeStatus, NodeSupervisor
from shapeshift.fleet.supervision.plan import FleetPlan, NodePlan
from shapeshift.triton.keys import ensure_key

_ANSWER_S = 60.0
# An actor's process gets it from Ray; the raylet of a cluster that others have started may lack it.
_ENVIRONMENT = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}


class NodeActor(NodeSupervisor):
    """Supervises one node on the machine on which Ray places it."""

    def __init__(self, plan: NodePlan, fleet: FleetPlan) -> None:
        write_first(plan.command.file.parent, plan.files)
        ensure_fleet_file(plan, fleet)
        super().__init__(plan.command, continues=is_restarted())

    def write_files(self, files: dict[str, bytes]) -> None:
        """Replace the node's certificate: new connections use it, and its server once it starts again."""
        write_private(self.command().file.parent, files)

    def describe(self) -> tuple[NodeStatus, str]:
        """The node's state, and its control key, which only the sidecar gets."""
        return self.status(), ensure_key(self.command().run_directory / "key")

    def pid(self) -> int:
        """The process of this actor."""
        return os.getpid()


def is_restarted() -> bool:
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


def write_first(folder: Path, contents: dict[str, bytes]) -> None:
    """What an actor was first started with; one that Ray starts again keeps the files that came later."""
    if not is_restarted():
        write_private(folder, contents)


def write_private(folder: Path, contents: dict[str, bytes]) -> None:
    """Write files that only their owner can read; those that say the same stay."""
    for name, content in contents.items():
        file = folder / name
        if not file.is_file() or file.read_bytes() != content:
            replace_private(file, content)


def rooms(ray: Any, settings: RaySettings) -> dict[str, int]:
    """By address, for how many nodes the present machines have room; see `plan.rooms`."""
    alive = ((str(one["NodeManagerAddress"]), one["Resources"]) for one in ray.nodes() if one["Alive"])
    return plans.rooms(alive, settings)


def kept_nodes(ray: Any, home: Path, settings: RaySettings) -> dict[str, str]:
    """By node that a lost head has left on a present machine, the machine's address.

    home: folder of every machine for the files of its nodes. A machine that does not answer within a minute has none.
    """
    files = [(name, plans.fleet_file_of(home, name)) for name in plans.node_names(settings.nodes)]
    answers = {}
    for host in sorted({str(one["NodeManagerAddress"]) for one in ray.nodes() if one["Alive"]}):
        ask = ray.remote(kept_here).options(num_cpus=0, resources={f"node:{host}": 0.001})
        answers[host] = ask.remote(files, host)
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ANSWER_S)
    nodes: dict[str, str] = {}
    for host, answer in answers.items():
        with contextlib.suppress(ray.exceptions.RayError):
            nodes |= dict.fromkeys(ray.get(answer, timeout=0), host)
    return nodes


def lasting(name: str) -> Mapping[str, Any]:
    """The options of an actor that Ray starts again, and that outlives the command."""
    options = {"max_restarts": -1, "max_concurrency": 8, "runtime_env": _ENVIRONMENT}
    return {"name": name, "lifetime": "detached", "get_if_exists": True, **options}


def node_actor(ray: Any, one: NodePlan, plan: FleetPlan) -> Any:
    """The actor of a node of the plan, started where there is none. Returns before it is ready."""
    settings = plan.settings
    # The resource that Ray gives every machine by its address keeps a node where its files are.
    options = {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "resources": {f"node:{one.host}": 0.001}}
    return ray.remote(NodeActor).options(**options, **lasting(one.node.name)).remote(one, plan)
