"""How many nodes a fleet should have: as many as hold the workers that its fronts want.

The workers follow the latency by target tracking (Arlo, section 4, resource scaling); the nodes follow the workers. A
front that has no workers, or as many on every node, fills whole nodes: there one node stands in the place of one
worker, and what is tracked is the tail latency over its objective, and the share of slots and of the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shapeshift.polymorph.policy import autoscale

# As long as the paper waits before it releases a worker.
IN_AFTER_S = autoscale.PAPER.in_after_s
_IN_SHARE = autoscale.PAPER.in_share


@dataclass(frozen=True)
class WorkerDemand:
    """workers: how many a front wants, at least 0; per_node: how many of them one node can hold, at least 1."""

    workers: int
    per_node: int


@dataclass(frozen=True)
class NodeLimits:
    """The fewest and the most nodes, least >= 1."""

    least: int
    most: int


def needed_nodes(demands: Iterable[WorkerDemand]) -> int:
    """The nodes that hold what each front wants; every node serves all fronts. 0 without a front."""
    return max((math.ceil(one.workers / one.per_node) for one in demands), default=0)


def decide(needed: int, present: int, fewer_since_s: float, limits: NodeLimits) -> int:
    """How many nodes there should be: all that are needed at once, or one fewer.

    needed: 0 if unknown; fewer_since_s: for how long fewer than the present nodes have been needed. The limits take
    precedence.
    """
    target = present
    if needed > present:
        target = needed
    elif 0 < needed < present and fewer_since_s >= IN_AFTER_S:
        target = present - 1
    return min(max(target, limits.least), limits.most)


@dataclass(frozen=True)
class NodeUse:
    """What a front uses of its nodes, 1 or more where that is all.

    latency: p98 over `slo_ms`; occupancy: requests that wait or run over slots, or the share of the KV cache, whichever
    is more. None: unknown, or there is no such limit.
    """

    latency: float | None
    occupancy: float | None

    @property
    def is_known(self) -> bool:
        return self.latency is not None or self.occupancy is not None

    @property
    def most(self) -> float:
        """The larger one."""
        return max(self.latency or 0.0, self.occupancy or 0.0)

    def is_fast(self, nodes: int) -> bool:
        """Whether one of `nodes` could be one too many: what it holds must find room on the others."""
        if not self.is_known or nodes < 2:
            return False
        moved = (self.occupancy or 0.0) * nodes / (nodes - 1)
        return max(self.latency or 0.0, moved) < _IN_SHARE


def wanted_nodes(use: NodeUse, fast_since_s: float, nodes: int) -> int:
    """One more or one fewer than the present `nodes` (at least 1), or as many, also where nothing is known.

    fast_since_s: for how long `NodeUse.is_fast` has been true, 0 if it is not.
    """
    if not use.is_known:
        return nodes
    scaling = autoscale.decide(use.most, 1.0, fast_since_s, [0] * nodes, 1, nodes + 1)
    return nodes + {"out": 1, "keep": 0, "in": -1}[scaling.action]
