"""Ray, as a fleet uses it: its machines, the actors that outlive a command, and its autoscaler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.fleet.membership.written import RaySettings
from shapeshift.fleet.supervision import plan as plans
from shapeshift.fleet.supervision.node_actor import NodeActor
from shapeshift.fleet.supervision.plan import FleetPlan, NodePlan

# An actor's process gets it from Ray; the raylet of a cluster that others have started may lack it.
_ENVIRONMENT = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}


def rooms(ray: Any, settings: RaySettings) -> dict[str, int]:
    """By address, for how many nodes the present machines have room; see `plan.rooms`."""
    alive = ((str(one["NodeManagerAddress"]), one["Resources"]) for one in ray.nodes() if one["Alive"])
    return plans.rooms(alive, settings)


def lasting(name: str) -> Mapping[str, Any]:
    """The options of an actor that Ray starts again, and that outlives the command."""
    own = {"max_restarts": -1, "max_concurrency": 8, "runtime_env": _ENVIRONMENT}
    return {"name": name, "lifetime": "detached", "get_if_exists": True, **own}


def node_actor(ray: Any, one: NodePlan, plan: FleetPlan) -> Any:
    """The actor of a node of the plan, started where there is none. Returns before it is ready."""
    own = plan.settings
    # The resource that Ray gives every machine by its address keeps a node where its files are.
    wanted = {"num_cpus": own.cpus, "num_gpus": own.gpus, "resources": {f"node:{one.host}": 0.001}}
    return ray.remote(NodeActor).options(**wanted, **lasting(one.node.name)).remote(one, plan)


def request(settings: RaySettings, nodes: int) -> None:
    """Ask Ray's autoscaler for machines for so many nodes, those that run included.

    It holds until the next call; 0 takes it back. A cluster without an autoscaler ignores it.
    """
    from ray.autoscaler.sdk import request_resources

    reserved = {"CPU": settings.cpus, "GPU": settings.gpus}
    bundle = {name: count for name, count in reserved.items() if count}
    request_resources(bundles=[bundle] * nodes if bundle else [])
