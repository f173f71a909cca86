"""How many nodes a fleet should have: as many as hold the workers that its fronts want.

The workers follow the latency by target tracking (Arlo, section 4, resource scaling); the nodes follow the workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# As long as the paper waits before it releases a worker.
IN_AFTER_S = 60.0


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
