"""The actors of all nodes of a fleet, with the plan that names them: asked, added, taken away."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shapeshift.fleet.supervision import plan as plans
from shapeshift.fleet.supervision import ray_nodes
from shapeshift.fleet.supervision.node_record import LOAD
from shapeshift.fleet.supervision.node_supervisor import STOPPED, NodeStatus
from shapeshift.fleet.supervision.plan import FleetPlan

_ASK_S = 2.0


class NodeActors:
    """Used by one thread. actors: by node of the plan. plan, known: by node, the state and the control key that its
    supervisor has told last."""

    def __init__(self, ray: Any, plan: FleetPlan, actors: dict[str, Any]) -> None:
        self._ray = ray
        self.plan = plan
        self.actors = dict(actors)
        self.known: dict[str, tuple[NodeStatus, str]] = {}

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
                self.known[name] = self._ray.get(answer, timeout=0)

    def names(self) -> Sequence[str]:
        """See `node_scaler.Nodes`; so for the methods below."""
        return list(self.actors)

    def request(self, nodes: int) -> None:
        ray_nodes.request(self.plan.settings, nodes)

    def start(self, name: str) -> bool:
        host = plans.free_host(ray_nodes.rooms(self._ray, self.plan.settings), self.plan.hosts.values())
        if host is None:
            return False
        grown = self.plan.with_node(name, host)
        # Served as the first node is now: an upgrade may have changed that since the plan was made.
        first = self._ray.get(self.actors[plans.FIRST].command.remote(), timeout=_ASK_S)
        added = grown.nodes[-1]
        added = replace(added, command=replace(first, name=name, file=added.command.file))
        self.actors[name] = ray_nodes.node_actor(self._ray, added, grown)
        self.plan = grown
        return True

    def are_serving(self) -> bool:
        return all(name in self.known and self.known[name][0].is_member for name in self.actors)

    def drain(self, name: str) -> None:
        self._ray.get(self.actors[name].drain.remote(LOAD), timeout=_ASK_S)
        if name in self.known:
            status, key = self.known[name]
            self.known[name] = replace(status, drained_for=LOAD), key

    def leaving(self) -> str:
        names = (name for name, (status, _) in self.known.items() if status.drained_for == LOAD)
        return next(names, "")

    def is_stopped(self, name: str) -> bool:
        # Nor does a node end requests whose machine has gone.
        hosts = {str(one["NodeManagerAddress"]) for one in self._ray.nodes() if one["Alive"]}
        return self.known[name][0].state == STOPPED or self.plan.hosts[name] not in hosts

    def remove(self, name: str) -> None:
        self._ray.kill(self.actors.pop(name))
        self.known.pop(name, None)
        self.plan = self.plan.without(name)
