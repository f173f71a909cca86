"""Membership by a file that another process writes: the supervisor of a node, which asks Ray.

    membership = "ray"

    [ray]
    nodes = 3
    build = "/srv/shapeshift/build"

The file is a fleet file with membership `static`. The other fields are those of `shapeshift fleet up`.
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
from shapeshift.fleet.policy.node_count import NodeLimits
from shapeshift.fleet.settings import section
from shapeshift.settings import require


@dataclass(frozen=True)
class RaySettings:
    """The section [ray] of a fleet file. Relative paths are relative to the file.

    nodes_file    written by the supervisor
    address       of a Ray cluster, HOST:PORT of its head; empty: one on this machine, which `fleet up` starts
    nodes         how many, named node-0, node-1, ...
    min_nodes     the fewest that are left where their number follows the latency; 0: `nodes`
    max_nodes     the most that are started then; 0: `nodes`
    grpc_port     of the first node; each further one has the next port, so that machines may have several
    metrics_port  likewise
    cpus, gpus    that Ray reserves for each node
    build         build folder of every machine, with models and server
    folder        of each machine, for the files of its nodes: certificates and keys
    serve         further options of `shapeshift serve` for each node, such as "--models encode"
    Raises InvalidInputError with the name of the field.
    """

    nodes_file: str = "nodes.toml"
    address: str = ""
    nodes: int = 1
    min_nodes: int = 0
    max_nodes: int = 0
    grpc_port: int = 18001
    metrics_port: int = 18501
    cpus: float = 1.0
    gpus: float = 0.0
    build: str = "build"
    folder: str = "fleet"
    serve: str = ""

    def __post_init__(self) -> None:
        for name in ("nodes_file", "build", "folder"):
            require(bool(getattr(self, name)), name, getattr(self, name), "must name a file or folder")
        require(1 <= self.nodes <= 1000, "nodes", self.nodes, "must be 1 to 1000")
        least, most = self.limits.least, self.limits.most
        require(1 <= least <= self.nodes, "min_nodes", self.min_nodes, f"must be 1 to nodes ({self.nodes}), or 0")
        require(self.nodes <= most <= 1000, "max_nodes", self.max_nodes, f"must be nodes ({self.nodes}) to 1000, or 0")
        for name in ("grpc_port", "metrics_port"):
            port = getattr(self, name)
            require(0 < port <= 65536 - most, name, port, "must be 1 to 65535 for each node")
        for name in ("cpus", "gpus"):
            require(0 <= getattr(self, name) <= 4096, name, getattr(self, name), "must be 0 to 4096")
        apart = abs(self.grpc_port - self.metrics_port) >= most
        require(apart, "metrics_port", self.metrics_port, "must not fall among the gRPC ports of the nodes")

    @property
    def limits(self) -> NodeLimits:
        """The fewest and the most nodes."""
        return NodeLimits(self.min_nodes or self.nodes, self.max_nodes or self.nodes)

    @property
    def is_scaled(self) -> bool:
        """Whether the number of nodes follows the latency."""
        return self.limits.least < self.limits.most


def read(values: Mapping[str, Any]) -> RaySettings:
    """The settings of a section [ray]. Raises ShapeshiftError with the names of section and field."""
    with section("ray"):
        settings.refuse_unknown(values, settings.names(RaySettings))
        for name, value in values.items():
            require(not isinstance(value, list | dict), name, value, "must be one text or number")
        return settings.read(RaySettings, {name: str(value) for name, value in values.items()})


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
