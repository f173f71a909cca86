"""What the plan loop remembers of one front: the bins that its workers should hold, its nodes, its periods."""

from __future__ import annotations

from dataclasses import dataclass, field

from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.workers import ServerModels
from shapeshift.triton.names import qualified, split


@dataclass
class FrontState:
    """One front. target: the bin that each worker should hold; plan_page, scale_page: start of the present periods;
    last_plan_page: start of the last plan's period.

    replan: why it is planned before its period is over. nodes: those whose workers the plan takes into account; seen:
    all that had the front.
    """

    target: dict[str, int] = field(default_factory=dict)
    plan_page: MetricsPage | None = None
    last_plan_page: MetricsPage | None = None
    scale_page: MetricsPage | None = None
    fast_since: float | None = None
    replan: str = ""
    nodes: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()
    _before: int = 0

    def follow(self, front: Front, server: ServerModels) -> None:
        """Let go of the workers of lost nodes, and ask for a plan for what is left, or for what has joined.

        A node that answers, but whose front is being loaded again, is not lost.
        """
        lost, joined = self.nodes - server.nodes - server.pending, front.nodes - self.nodes
        if not lost and not joined:
            return
        self.nodes, self.seen = (self.nodes | joined) - lost, self.seen | joined
        self._before = len(self.target)
        self.target = {worker: bin_ for worker, bin_ in self.target.items() if split(worker)[0] not in lost}
        changes = [f"node {node} is lost" for node in sorted(lost)]
        self.replan = ", ".join([*changes, *(f"node {node} has joined" for node in sorted(joined))])

    def wanted(self, front: Front) -> int:
        """How many workers the front should have after its nodes have changed; 0: as many as now.

        As many as configured, or as many as before where the number follows the latency.
        """
        if not self.replan:
            return 0
        return max(len(self.target), self._before if front.is_scaled else front.workers)

    def models(self, front: Front) -> list[str]:
        """The front's models, also those of lost nodes: what arrived there arrives elsewhere now."""
        return [qualified(node, front.name) for node in sorted(self.seen)]

    def period_start(self, now: float, period_s: float) -> MetricsPage | None:
        """From where to count what arrived: from the last plan, or from the plan before if the last one is recent."""
        start = self.plan_page
        recent = start is not None and now - start.at < period_s / 2
        return self.last_plan_page or start if recent else start
