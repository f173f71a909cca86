"""Membership by a file that another process writes: the supervisor of a node, which asks Ray.

    membership = "ray"

    [ray]
    nodes_file = "run/nodes.toml"

The file is a fleet file with membership `static`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.membership.interface import Members
from shapeshift.fleet.membership.static import StaticMembership
from shapeshift.settings import require


@dataclass(frozen=True)
class RaySettings:
    """The section [ray] of a fleet file. nodes_file: written by the supervisor, relative to the fleet file."""

    nodes_file: str = "nodes.toml"

    def __post_init__(self) -> None:
        require(bool(self.nodes_file), "nodes_file", self.nodes_file, "must name a file")


def read(section: Mapping[str, Any]) -> RaySettings:
    """The settings of a section [ray]. Raises InvalidInputError with the name of the field."""
    settings.refuse_unknown(section, settings.names(RaySettings))
    return settings.read(RaySettings, {name: str(value) for name, value in section.items()})


class WrittenMembership:
    """The nodes of the fleet file `path`, as the node `node` reads it; none, with a problem, until it is written."""

    def __init__(self, path: Path, node: str = "") -> None:
        self._path = path
        self._node = node
        self._file: StaticMembership | None = None

    def members(self) -> Members:
        """The nodes of the file's last valid content."""
        if self._file is None:
            try:
                self._file = StaticMembership(self._path, self._node)
            except ShapeshiftError as error:
                return Members(problem=str(error))
        return self._file.members()

    def close(self) -> None:
        """Nothing is held."""
