"""The fleet file: TOML that names the nodes of a fleet, or says where their names are found.

    name = "demo"
    membership = "static"

    [tls]
    ca = "ca.pem"
    certificate = "{node}.pem"
    key = "{node}.key"

    [[nodes]]
    name = "a"
    grpc = "10.0.0.1:8001"
    metrics = "https://10.0.0.1:8003/metrics"
    key_file = "a.control-key"

Relative paths are relative to the file. `{node}` stands for the name of the node that reads the file. With membership
`dns` or `ray` the nodes are found elsewhere, as the section of that name says.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.fleet.node import Node, check_node_name
from shapeshift.fleet.policy.node_count import NodeLimits
from shapeshift.settings import require
from shapeshift.triton.endpoint import Endpoint, Tls

MEMBERSHIPS = ("static", "dns", "ray")

_NODE_FIELDS = ("name", "grpc", "metrics", "key_file")
_TLS_FIELDS = ("ca", "certificate", "key")


@dataclass(frozen=True)
class FleetSettings:
    """What a fleet file says.

    name        of the fleet, a DNS label
    membership  where the nodes are found: one of MEMBERSHIPS
    tls         files of mutual TLS, `{node}` replaced; None for plain text
    nodes       the nodes of membership `static`
    source      by kind, the values of the section [dns] or [ray]
    """

    name: str
    membership: str = "static"
    tls: Tls | None = None
    nodes: tuple[Node, ...] = ()
    source: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RaySettings:
    """The section [ray] of a fleet file. Relative paths are relative to the file.

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
        for name in ("build", "folder"):
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


def read(path: Path, node: str = "") -> FleetSettings:
    """The fleet file `path`, as the node `node` (empty: none) reads it.

    Raises NotFoundError if it is missing, ShapeshiftError if it is no TOML, InvalidInputError naming file and field.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"no fleet file at {path}") from None
    except (OSError, ValueError) as error:
        raise ShapeshiftError(f"{path}: {error}") from None
    try:
        return _parse(data, path.parent, node)
    except ShapeshiftError as error:
        raise ShapeshiftError(f"{path}: {error}") from None


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """While what the section [name] holds is read: an InvalidInputError becomes a ShapeshiftError that names it."""
    try:
        yield
    except InvalidInputError as error:
        raise ShapeshiftError(f"[{name}] {error}") from None


def ray_settings(fleet: FleetSettings) -> RaySettings:
    """The settings of the section [ray]. Raises ShapeshiftError with the names of section and field."""
    values = fleet.source.get("ray", {})
    with section("ray"):
        settings.refuse_unknown(values, settings.names(RaySettings))
        for name, value in values.items():
            require(not isinstance(value, list | dict), name, value, "must be one text or number")
        return settings.read(RaySettings, {name: str(value) for name, value in values.items()})


def text(name: str, tls: Tls | None, nodes: Iterable[Node]) -> str:
    """A fleet file with membership `static`. Paths are written as they are."""
    parts = [_toml({"name": name})]
    if tls is not None:
        parts.append("[tls]\n" + _toml({"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}))
    for node in nodes:
        key = {} if node.key_file is None else {"key_file": node.key_file}
        values = {"name": node.name, "grpc": node.grpc.address, "metrics": node.metrics, **key}
        parts.append("[[nodes]]\n" + _toml(values))
    return "\n".join(parts)


def _toml(values: dict[str, object]) -> str:
    # A JSON string is a basic string of TOML.
    return "".join(f"{name} = {json.dumps(str(value), ensure_ascii=False)}\n" for name, value in values.items())


def _parse(data: dict[str, Any], folder: Path, node: str) -> FleetSettings:
    settings.refuse_unknown(data, ("name", "membership", "tls", "nodes", "dns", "ray"))
    name = check_node_name(_text(data, "name"))
    membership = _text(data, "membership", "static")
    require(membership in MEMBERSHIPS, "membership", membership, f"must be one of {', '.join(MEMBERSHIPS)}")
    tls = _tls(_table(data, "tls"), folder, node) if "tls" in data else None
    entries = data.get("nodes", [])
    require(isinstance(entries, list), "nodes", entries, "must be written as [[nodes]]")
    listed = [_node(number, entry, folder, tls) for number, entry in enumerate(entries, start=1)]
    nodes = tuple(sorted(listed, key=lambda one: one.name))
    _require_distinct(nodes)
    require(bool(nodes) or membership != "static", "nodes", nodes, "at least one [[nodes]] with membership static")
    source: dict[str, dict[str, Any]] = {kind: _table(data, kind) for kind in ("dns", "ray") if kind in data}
    return FleetSettings(name, membership, tls, nodes, source)


def _node(number: int, entry: object, folder: Path, tls: Tls | None) -> Node:
    """The node of the section [[nodes]] with this number, which its errors name beside the node."""
    require(isinstance(entry, dict), "nodes", entry, "must be written as [[nodes]]")
    assert isinstance(entry, dict)
    try:
        settings.refuse_unknown(entry, _NODE_FIELDS)
        key_file = folder / _text(entry, "key_file") if "key_file" in entry else None
        return Node(_text(entry, "name"), Endpoint(_text(entry, "grpc"), tls), _text(entry, "metrics"), key_file)
    except InvalidInputError as error:
        raise ShapeshiftError(f"[[nodes]] number {number}, {entry.get('name', 'without a name')}: {error}") from None


def _tls(entry: dict[str, Any], folder: Path, node: str) -> Tls:
    with section("tls"):
        settings.refuse_unknown(entry, _TLS_FIELDS)
        return Tls(*(folder / _text(entry, name).replace("{node}", node) for name in _TLS_FIELDS))


def _require_distinct(nodes: Iterable[Node]) -> None:
    """Raise InvalidInputError for two nodes of one name, or of one address."""
    for field_name in ("name", "grpc", "metrics"):
        seen = set()
        for node in nodes:
            value = getattr(node, field_name)
            require(value not in seen, f"node {node.name}: {field_name}", value, "another node has the same")
            seen.add(value)


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data[name]
    if not isinstance(value, dict):
        raise InvalidInputError(name, value, f"must be a section [{name}]")
    return value


def _text(data: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = data.get(name, default)
    if not isinstance(value, str) or not value:
        raise InvalidInputError(name, value, "must be a text that is not empty")
    return value
