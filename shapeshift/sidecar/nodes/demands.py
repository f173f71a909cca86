"""What the sidecar says about the workers and the nodes that each front wants, whether or not the fleet has them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from shapeshift.fleet import worker_demand
from shapeshift.fleet.policy.node_count import WorkerDemand
from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.nodes.node_demand import NodeDemand
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.workers import ServerModels


class Demands:
    """Writes `file` where something changes. file: None to write nothing. period_s: see `NodeDemand`."""

    def __init__(self, file: Path | None, period_s: float) -> None:
        self._file = file
        self._nodes = NodeDemand(period_s)
        # Of fronts whose number of workers follows the latency, and of the others.
        self._workers: dict[str, WorkerDemand] = {}
        self._whole: Mapping[str, WorkerDemand] = {}
        self._known: dict[str, WorkerDemand] = {}

    def record(self, front: Front, workers: int) -> None:
        """The front wants so many workers."""
        per_node = max(1, front.max_workers // max(1, len(front.nodes)))
        self._workers[front.name] = WorkerDemand(workers, per_node)

    def step(self, server: ServerModels, page: MetricsPage | None, is_blocked: bool) -> None:
        """Take the present page into account, forget fronts that are gone, and say what is wanted.

        is_blocked: nothing is to change; then nothing is wanted.
        """
        if page is not None and self._file is not None:
            self._whole = self._nodes.step(server, page)
        self._workers = {name: one for name, one in self._workers.items() if name in server.fronts}
        known = {} if is_blocked else {**self._whole, **self._workers}
        if known == self._known:
            return
        self._known = known
        if self._file is not None:
            # On a full disk the nodes stay; workers and plans do not depend on it.
            with contextlib.suppress(OSError):
                worker_demand.write(self._file, known)
