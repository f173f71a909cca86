"""The file in which a fleet's sidecar says how many workers each front wants, for who provides the nodes.

It is a wish, not a plan: numbers, not changes. Reading it twice, or late, does no harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from shapeshift import files
from shapeshift.fleet.policy.node_count import WorkerDemand

# In the run directory of the sidecar.
DEMAND_FILE = "demand.json"


def write(file: Path, demands: Mapping[str, WorkerDemand]) -> None:
    """Replace the file. demands: by front. Raises OSError."""
    text = json.dumps({name: [one.workers, one.per_node] for name, one in sorted(demands.items())})
    files.replace_text(file, text + "\n", durable=False)


def read(file: Path) -> dict[str, WorkerDemand]:
    """By front, what it wants; empty if the file is missing or damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        demands = {str(name): WorkerDemand(int(workers), int(per_node)) for name, (workers, per_node) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {name: one for name, one in demands.items() if one.workers >= 0 and one.per_node >= 1}
