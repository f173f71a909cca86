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
        ray_nodes.request(self.plan.settings, nodes)

    def start(self, name: str) -> bool:
        """Start the node on a machine with room; False if there is none."""
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
