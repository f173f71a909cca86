"""The actor of a fleet: it passes membership on, keeps the sidecar running, and lets the nodes follow the load.

Ray starts it again where it ends. It keeps nothing that it cannot read back: membership is what the supervisors say.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shapeshift.child_process import ChildProcess
from shapeshift.files import replace_private
from shapeshift.fleet.policy import node_count
from shapeshift.fleet.policy.node_count import NodeLimits, WorkerDemand
from shapeshift.fleet.sidecar import demands
from shapeshift.fleet.supervision import plan as plans
from shapeshift.fleet.supervision.actors import NodeActors, write_private
from shapeshift.fleet.supervision.plan import SIDECAR, FleetPlan, node_names, node_number
from shapeshift.loops import Loop

Log = Callable[[str], None]
FLEET_ACTOR = "fleet"
# What was decided about nodes, and why; beside the sidecar's log.
NODES_LOG = "nodes.log"
# For so long a hold lasts, unless it is renewed. A new actor waits as long: who holds the nodes tells it, too.
HOLD_S = 15.0
_PERIOD_S = 1.0
_FIRST_ANSWERS_S = 15.0


class NodeScaler:
    """One thread calls `step`, about once a second. Which node is leaving, `nodes` knows. log: takes each line."""

    def __init__(
        self, nodes: NodeActors, limits: NodeLimits, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nodes = nodes
        self._limits = limits
        self._log = log
        self._clock = clock
        self._requested = 0
        self._fewer_since: float | None = None
        self._said = ""

    def step(self, demands: Mapping[str, WorkerDemand]) -> None:
        """Do what is due, one node at a time. demands: by front, the workers that it wants; empty if unknown."""
        if leaving := self._nodes.leaving():
            if not self._nodes.is_stopped(leaving):
                return
            self._nodes.remove(leaving)
            self._log(f"{leaving}: has ended its requests and is gone")
        names = sorted(self._nodes.names(), key=node_number)
        needed, now = node_count.needed_nodes(demands.values()), self._clock()
        # What the fronts need now is served by the nodes that serve: none of them goes while another is away.
        if not 0 < needed < len(names) or not self._nodes.are_serving():
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        fewer_since_s = 0.0 if self._fewer_since is None else now - self._fewer_since
        target = node_count.decide(needed, len(names), fewer_since_s, self._limits)
        # A machine is given back only after its node has gone.
        self._request(max(target, len(names)))
        if target > len(names):
            self._add(names, target, demands)
        elif target < len(names):
            self._nodes.drain(names[-1])
            self._fewer_since = None
            self._log(f"{names[-1]}: drained, {target} nodes are enough: {_format(demands)}")

    def _add(self, names: Sequence[str], target: int, demands: Mapping[str, WorkerDemand]) -> None:
        name = next(name for name in node_names(self._limits.most) if name not in names)
        if self._nodes.start(name):
            self._log(f"{name}: started, {target} nodes are needed: {_format(demands)}")
            self._said = ""
        elif self._said != name:
            self._log(f"{name}: no machine has room; Ray's autoscaler was asked for {target} nodes")
            self._said = name

    def _request(self, nodes: int) -> None:
        if nodes != self._requested:
            self._nodes.request(nodes)
            self._requested = nodes


def _format(demands: Mapping[str, WorkerDemand]) -> str:
    return ", ".join(f"{name} wants {_amount(one)}" for name, one in demands.items()) or "by nodes and max_nodes"


def _amount(demand: WorkerDemand) -> str:
    return f"{demand.workers} workers, {demand.per_node} a node" if demand.per_node > 1 else f"{demand.workers} nodes"


class FleetActor:
    """Passes membership on to every node each second, keeps the sidecar of the fleet running, and scales the nodes.

    There is one by its name: Ray gives a name to one actor only, which is the sidecar's lease. nodes: the node actors.
    files: the sidecar's certificate. plan_period_s: the sidecar's; None for no sidecar. authority: files of the one
    that signs the certificates of further nodes; empty where none is needed.
    """

    def __init__(
        self,
        plan: FleetPlan,
        nodes: dict[str, Any],
        files: dict[str, bytes],
        plan_period_s: float | None,
        authority: Mapping[str, bytes],
    ) -> None:
        import ray

        self._folder = plan.home / SIDECAR
        write_private(self._folder, files)
        plans.write_authority(plan.home, authority)
        self._limits = plan.settings.limits
        self._nodes = NodeActors(ray, plan, nodes)
        self._scaler = None
        if plan.settings.is_scaled:
            self._scaler = NodeScaler(self._nodes, self._limits, self._log)
        self._knows_all = not plan.settings.is_scaled or self._nodes.find()
        self._held_until = time.monotonic() + HOLD_S
        self._sent: dict[str, str] = {}
        self._sidecar = None if plan_period_s is None else self._make_sidecar(plan_period_s)
        self._is_running = False
        # Not to take nodes out of the list only because this actor is new.
        self._waits_until = time.monotonic() + _FIRST_ANSWERS_S
        self._loop = Loop("membership", self._pass_on, _warn)
        self._loop.start()

    def hosts(self) -> dict[str, str]:
        """By node, the address of its machine."""
        return self._nodes.plan.hosts

    def scope(self) -> tuple[dict[str, str], NodeLimits]:
        """The address of gRPC of each node that this actor knows, and how many there may be."""
        return {one.node.name: one.node.grpc.address for one in self._nodes.plan.nodes}, self._limits

    def hold_nodes(self, seconds: float) -> None:
        """Neither add nor take away nodes for so long from now, such as during an upgrade."""
        self._held_until = time.monotonic() + seconds

    def pid(self) -> int:
        """The process of this actor."""
        return os.getpid()

    def _make_sidecar(self, plan_period_s: float) -> ChildProcess:
        first = self._nodes.plan.nodes[0].command
        options = [
            f"--fleet={self._folder / 'fleet.toml'}",
            f"--build={self._folder}",
            f"--plan-period={plan_period_s}",
        ]
        options.append(f"--repository={first.build / 'repository'}")
        return ChildProcess(SIDECAR, options, self._folder / "sidecar.log")

    def _pass_on(self) -> float:
        """Ask each node for its state, and send the fleet file with the present members to all nodes."""
        nodes = self._nodes
        self._knows_all = self._knows_all or nodes.find()
        nodes.ask()
        if len(nodes.answers) < len(nodes.actors) and time.monotonic() < self._waits_until:
            return _PERIOD_S
        members = [name for name, (status, _) in nodes.answers.items() if status.is_member]
        for name, actor in nodes.actors.items():
            # A node reads its own addresses in the file, whether it is a member or not.
            text = nodes.plan.fleet_file(sorted({*members, name}), name)
            actor.write_fleet_file.remote(text)
        if members:
            self._serve_sidecar(members)
        is_held = time.monotonic() < self._held_until
        if self._scaler is not None and self._knows_all and not is_held:
            run_directory = self._folder / "fleet" / nodes.plan.name
            self._scaler.step(demands.read(run_directory / demands.DEMAND_FILE))
        return _PERIOD_S

    def _serve_sidecar(self, members: list[str]) -> None:
        if self._sidecar is None:
            return
        keys = {f"{name}.control-key": self._nodes.answers[name][1].encode() for name in members}
        write_private(self._folder, keys)
        text = self._nodes.plan.fleet_file(members, SIDECAR, {name: Path(f"{name}.control-key") for name in members})
        file = self._folder / "fleet.toml"
        if self._sent.get(SIDECAR) != text:
            replace_private(file, text.encode())
            self._sent[SIDECAR] = text
        if self._is_running:
            self._sidecar.restart_if_ended()
        else:
            self._sidecar.start()
            self._is_running = True

    def _log(self, text: str) -> None:
        with (self._folder / NODES_LOG).open("a", encoding="utf-8") as log:
            log.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {text}\n")


def _warn(text: str) -> None:
    # Ray keeps what its actors write.
    sys.stderr.write(f"{text}\n")
