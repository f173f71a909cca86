"""Adds and takes away nodes: the nodes follow the workers that the fronts want."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from shapeshift.fleet.policy import node_count
from shapeshift.fleet.policy.node_count import NodeLimits, WorkerDemand
from shapeshift.fleet.supervision.node_actors import NodeActors
from shapeshift.fleet.supervision.plan import node_names, node_number

Log = Callable[[str], None]


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
