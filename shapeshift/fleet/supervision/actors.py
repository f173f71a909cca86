"""Ray, as a fleet uses it: its machines, its autoscaler, and the actors of the nodes: one supervises each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapeshift.errors import ShapeshiftError
from shapeshift.files import replace_private, replace_text
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.settings import RaySettings
from shapeshift.fleet.supervision import plan as plans
from shapeshift.fleet.supervision.node_process import LOAD, kept_here
from shapeshift.fleet.supervision.node_supervisor import STOPPED, NodeStatus, NodeSupervisor
from shapeshift.fleet.supervision.plan import FleetPlan, NodePlan
from shapeshift.triton.keys import ensure_key

_ANSWER_S = 60.0
# An actor's process gets it from Ray; the raylet of a cluster that others have started may lack it.
_ENVIRONMENT = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
_ASK_S = 2.0


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


def request_machines(settings: RaySettings, nodes: int) -> None:
    """Ask Ray's autoscaler for machines for so many nodes, those that run included.

    It holds until the next call; 0 takes it back. A cluster without an autoscaler ignores it.
    """
    from ray.autoscaler.sdk import request_resources

    reserved = {"CPU": settings.cpus, "GPU": settings.gpus}
    bundle = {name: count for name, count in reserved.items() if count}
    request_resources(bundles=[bundle] * nodes if bundle else [])


class NodeActors:
    """Used by one thread. actors: by node of the plan. plan, answers: by node, the state and the control key that its
    supervisor has told last."""

    def __init__(self, ray: Any, plan: FleetPlan, actors: dict[str, Any]) -> None:
        self._ray = ray
        self.plan = plan
        self.actors = dict(actors)
        self.answers: dict[str, tuple[NodeStatus, str]] = {}

    def find(self) -> bool:
        """Take over the nodes that were added before, and let go of those that were taken away: the plan may be that of
        an earlier start. Whether all are known; one whose machine is away for now is not."""
        for name in list(self.actors):
            try:
                self._ray.get_actor(name)
            except ValueError:
                del self.actors[name]
                self.plan = self.plan.without(name)
        for name in plans.node_names(self.plan.settings.limits.most):
            if name not in self.actors:
                try:
                    actor = self._ray.get_actor(name)
                    host = self._ray.get(actor.host.remote(), timeout=_ASK_S)
                except ValueError:
                    # There is none of that name, nor of a higher number.
                    return True
                except self._ray.exceptions.RayError:
                    return False
                self.plan, self.actors[name] = self.plan.with_node(name, host), actor
        return True

    def ask(self) -> None:
        """Ask each supervisor for the state of its node. Where one does not answer, the last one stays: its server
        may well run."""
        answers = {name: actor.describe.remote() for name, actor in self.actors.items()}
        self._ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ASK_S)
        for name, answer in answers.items():
            with contextlib.suppress(self._ray.exceptions.RayError):
                self.answers[name] = self._ray.get(answer, timeout=0)

    def names(self) -> Sequence[str]:
        """The nodes that there are, also those that are not ready."""
        return list(self.actors)

    # What a scaler does, one node at a time. Each call may raise an error of Ray.

    def request(self, nodes: int) -> None:
        """Ask for machines for so many nodes. It holds until the next call."""
        request_machines(self.plan.settings, nodes)

    def start(self, name: str) -> bool:
        """Start the node on a machine with room; False if there is none."""
        host = plans.free_host(rooms(self._ray, self.plan.settings), self.plan.hosts.values())
        if host is None:
            return False
        grown = self.plan.with_node(name, host)
        # Served as the first node is now: an upgrade may have changed that since the plan was made.
        first = self._ray.get(self.actors[plans.FIRST].command.remote(), timeout=_ASK_S)
        added = grown.nodes[-1]
        added = replace(added, command=replace(first, name=name, file=added.command.file))
        self.actors[name] = node_actor(self._ray, added, grown)
        self.plan = grown
        return True

    def are_serving(self) -> bool:
        """Whether every node takes requests."""
        return all(name in self.answers and self.answers[name][0].is_member for name in self.actors)

    def drain(self, name: str) -> None:
        """Take the node out of the fleet for good, end its requests, and stop it. Returns at once."""
        self._ray.get(self.actors[name].drain.remote(LOAD), timeout=_ASK_S)
        if name in self.answers:
            status, key = self.answers[name]
            self.answers[name] = replace(status, drained_for=LOAD), key

    def leaving(self) -> str:
        """A node that was drained in this way, also by an earlier actor, and is still there; empty: none."""
        names = (name for name, (status, _) in self.answers.items() if status.drained_for == LOAD)
        return next(names, "")

    def is_stopped(self, name: str) -> bool:
        """Whether the leaving node has ended."""
        # Nor does a node end requests whose machine has gone.
        hosts = {str(one["NodeManagerAddress"]) for one in self._ray.nodes() if one["Alive"]}
        return self.answers[name][0].state == STOPPED or self.plan.hosts[name] not in hosts

    def remove(self, name: str) -> None:
        """Let go of a node that has ended, so that its machine is free."""
        self._ray.kill(self.actors.pop(name))
        self.answers.pop(name, None)
        self.plan = self.plan.without(name)
