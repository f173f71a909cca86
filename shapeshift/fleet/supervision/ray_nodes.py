"""Ray, as a fleet uses it: its machines, the actors that outlive a command, and its autoscaler."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapeshift.fleet.settings import RaySettings
from shapeshift.fleet.supervision import node_record
from shapeshift.fleet.supervision import plan as plans
from shapeshift.fleet.supervision.node_actor import NodeActor
from shapeshift.fleet.supervision.plan import FleetPlan, NodePlan

_ANSWER_S = 60.0
# An actor's process gets it from Ray; the raylet of a cluster that others have started may lack it.
_ENVIRONMENT = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}


def rooms(ray: Any, settings: RaySettings) -> dict[str, int]:
    """By address, for how many nodes the present machines have room; see `plan.rooms`."""
    alive = ((str(one["NodeManagerAddress"]), one["Resources"]) for one in ray.nodes() if one["Alive"])
    return plans.rooms(alive, settings)


def kept_nodes(ray: Any, home: Path, settings: RaySettings) -> dict[str, str]:
    """By node that a lost head has left on a present machine, the machine's address.

    home: folder of every machine for the files of its nodes. A machine that does not answer within a minute has none.
    """
    files = [(name, plans.fleet_file_of(home, name)) for name in plans.node_names(settings.limits.most)]
    answers = {}
    for host in sorted({str(one["NodeManagerAddress"]) for one in ray.nodes() if one["Alive"]}):
        ask = ray.remote(node_record.kept_here).options(num_cpus=0, resources={f"node:{host}": 0.001})
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


def request(settings: RaySettings, nodes: int) -> None:
    """Ask Ray's autoscaler for machines for so many nodes, those that run included.

    It holds until the next call; 0 takes it back. A cluster without an autoscaler ignores it.
    """
    from ray.autoscaler.sdk import request_resources

    reserved = {"CPU": settings.cpus, "GPU": settings.gpus}
    bundle = {name: count for name, count in reserved.items() if count}
    request_resources(bundles=[bundle] * nodes if bundle else [])
