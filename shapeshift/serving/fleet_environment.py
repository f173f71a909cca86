"""How the processes of a node's server learn of the fleet: by the environment that the server is started with."""

from __future__ import annotations

import os
from pathlib import Path

FLEET_FILE_VARIABLE = "SHAPESHIFT_FLEET"
NODE_VARIABLE = "SHAPESHIFT_NODE"


def fleet_file() -> Path | None:
    """The fleet file of the server that this process belongs to; None outside a fleet."""
    stated = os.environ.get(FLEET_FILE_VARIABLE)
    return Path(stated) if stated else None


def own_node() -> str:
    """The name of the node that this process belongs to; empty outside a fleet."""
    return os.environ.get(NODE_VARIABLE, "")
