"""What the sidecar says about the workers that each front wants, whether or not the fleet has nodes for them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from shapeshift.fleet import worker_demand
from shapeshift.fleet.policy.node_count import WorkerDemand
from shapeshift.sidecar.front_config import Front


class Demands:
    """Writes `file` where something changes. file: None to write nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, WorkerDemand] = {}

    def record(self, front: Front, workers: int | None) -> None:
        """The front wants so many workers; None: as many as it has."""
        known = {name: one for name, one in self._known.items() if name != front.name}
        if workers is not None:
            known[front.name] = WorkerDemand(workers, max(1, front.max_workers // max(1, len(front.nodes))))
        self._replace(known)

    def keep(self, fronts: Collection[str]) -> None:
        """Forget all fronts but these."""
        self._replace({name: one for name, one in self._known.items() if name in fronts})

    def _replace(self, known: dict[str, WorkerDemand]) -> None:
        if known == self._known:
            return
        self._known = known
        if self._file is not None:
            # On a full disk the nodes stay; workers and plans do not depend on it.
            with contextlib.suppress(OSError):
                worker_demand.write(self._file, known)
