"""How many nodes a front wants that fills whole nodes: it has no workers, or as many on every node.

Target tracking as for workers (Arlo, section 4, resource scaling), with one node in place of one worker. What is
tracked is the tail latency over its objective, and the share of slots and of the KV cache that requests take.
"""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.polymorph.policy import autoscale

_IN_SHARE = autoscale.PAPER.in_share


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
