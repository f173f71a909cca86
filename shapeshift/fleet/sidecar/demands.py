"""What the sidecar of a fleet says about the workers and nodes that each front wants, for who provides the nodes.

It is a file, a wish, not a plan: numbers, not changes. Reading it twice, or late, does no harm.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from shapeshift import files
from shapeshift.fleet.policy.node_count import WorkerDemand
from shapeshift.fleet.sidecar.node_demand import NodeDemand
from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.workers import ServerModels

# In the run directory of the sidecar.
DEMAND_FILE = "demand.json"


def read(file: Path) -> dict[str, WorkerDemand]:
    """By front, what it wants; empty if the file is missing or damaged."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        demands = {str(name): WorkerDemand(int(workers), int(per_node)) for name, (workers, per_node) in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {name: one for name, one in demands.items() if one.workers >= 0 and one.per_node >= 1}


def write(file: Path, demands: Mapping[str, WorkerDemand]) -> None:
    """Replace the file. demands: by front. Raises OSError."""
    text = json.dumps({name: [one.workers, one.per_node] for name, one in sorted(demands.items())})
    files.replace_text(file, text + "\n", durable=False)


class FleetDemands:
    """Writes `file` where something changes. period_s: see `NodeDemand`."""

    def __init__(self, file: Path, period_s: float) -> None:
        self._file = file
        self._nodes = NodeDemand(period_s)
        # Of fronts whose number of workers follows the latency, and of the others.
        self._workers: dict[str, WorkerDemand] = {}
        self._whole: Mapping[str, WorkerDemand] = {}
        self._written: dict[str, WorkerDemand] = {}

    def record(self, front: Front, workers: int) -> None:
        """The front wants so many workers."""
        per_node = max(1, front.max_workers // max(1, len(front.nodes)))
        self._workers[front.name] = WorkerDemand(workers, per_node)

    def step(self, server: ServerModels, page: MetricsPage | None, is_blocked: bool) -> None:
        """Take the present page into account, forget fronts that are gone, and say what is wanted.

        is_blocked: nothing is to change; then nothing is wanted.
        """
        if page is not None:
            self._whole = self._nodes.step(server, page)
        self._workers = {name: one for name, one in self._workers.items() if name in server.fronts}
        demands = {} if is_blocked else {**self._whole, **self._workers}
        if demands != self._written:
            self._written = demands
            # On a full disk the nodes stay; workers and plans do not depend on it.
            with contextlib.suppress(OSError):
                write(self._file, demands)
