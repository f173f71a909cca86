"""What a supervisor leaves for the next one: how its node is served, and that it is drained.

The file is beside the node's fleet file, on the node's machine: also a supervisor under a new head reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from shapeshift import files
from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.fleet.supervision.node_process import NodeCommand, NodeProcess

# Why a node is drained: somebody asked for it, or fewer nodes are enough for the load.
OPERATOR, LOAD = "operator", "load"
_FILE = "node.json"


@dataclass(frozen=True)
class NodeRecord:
    """command: how the node is served, or was before it was drained; drained_for: OPERATOR, LOAD, or empty."""

    command: NodeCommand
    drained_for: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether there is a node to take over: one that runs, or that somebody has drained."""
        return self.drained_for == OPERATOR or NodeProcess(self.command).identity is not None


def write(record: NodeRecord) -> None:
    """Replace the record of the node. Raises OSError."""
    command = asdict(record.command)
    values = {"build": str(command["build"]), "options": list(command["options"]), "python": command["python"]}
    text = json.dumps({**values, "drained_for": record.drained_for})
    file = record.command.file.with_name(_FILE)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.replace_text(file, text + "\n")


def read(name: str, fleet_file: Path) -> NodeRecord | None:
    """The record of the node `name`, which reads `fleet_file`; None if there is none, or it is damaged."""
    try:
        values = json.loads(fleet_file.with_name(_FILE).read_text(encoding="utf-8"))
        options = tuple(map(str, values["options"]))
        command = NodeCommand(name, fleet_file, Path(values["build"]), options, str(values["python"]))
        return NodeRecord(command, str(values["drained_for"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget(fleet_file: Path) -> None:
    """Remove the record of the node that reads `fleet_file`. Raises OSError."""
    fleet_file.with_name(_FILE).unlink(missing_ok=True)


def kept_here(fleet_files: Iterable[tuple[str, Path]], host: str) -> list[str]:
    """The nodes of the machine `host`, this one, that are to be taken over. fleet_files: names, and what each reads."""
    names = []
    for name, file in fleet_files:
        record = read(name, file)
        if record is not None and record.is_kept and _host(name, file) == host:
            names.append(name)
    return names


def _host(name: str, fleet_file: Path) -> str:
    """The machine of a node, by the address that it reads of itself; empty if that is unknown."""
    try:
        nodes = settings.read(fleet_file, name).nodes
    except ShapeshiftError:
        return ""
    return next((one.grpc.address.rpartition(":")[0] for one in nodes if one.name == name), "")
