"""The fleet file: TOML that names the nodes of a fleet, or says where their names are found.

    name = "demo"

    [tls]
    ca = "ca.pem"
    certificate = "{node}.pem"
    key = "{node}.key"

    [[nodes]]
    name = "a"
    grpc = "10.0.0.1:8001"
    metrics = "https://10.0.0.1:8003/metrics"
    key_file = "a.control-key"

Relative paths are relative to the file. `{node}` stands for the name of the node that reads the file. In the place of
[[nodes]], a section [dns] or [ray] says where the nodes are found.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shapeshift import settings
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.fleet.node import Node, check_node_name
from shapeshift.settings import require
from shapeshift.triton.endpoint import Endpoint, Tls
from shapeshift.triton.settings import ServerSettings

ADDRESS, HOSTNAME = "address", "hostname"
# How far the port of a Ray node's metrics page is above that of its gRPC: as many nodes as there may be.
METRICS_OFFSET = 1000

T = TypeVar("T")

_NODE_FIELDS = ("name", "grpc", "metrics", "key_file")
_TLS_FIELDS = ("ca", "certificate", "key")
_HOST = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.]{0,251}[A-Za-z0-9])?\.?")


@dataclass(frozen=True)
class DnsSettings:
    """The section [dns] of a fleet file.

    service       the name that has the addresses of all nodes
    grpc_port     of every node
    metrics_port  of every node
    names         `address`: a node is named by its address, 10-0-0-7; `hostname`: by the first label of the name that
                  its address has (PTR), as pods of a StatefulSet have it, and is reached under that name
    key_file      of a node, `{node}` replaced by its name; relative to the fleet file; empty: none
    Raises InvalidInputError with the name of the field.
    """

    service: str
    grpc_port: int = ServerSettings.grpc_port
    metrics_port: int = ServerSettings.metrics_port
    names: str = ADDRESS
    key_file: str = ""

    def __post_init__(self) -> None:
        require(bool(_HOST.fullmatch(self.service)), "service", self.service, "must be a DNS name")
        for name in ("grpc_port", "metrics_port"):
            require(0 < getattr(self, name) < 65536, name, getattr(self, name), "must be 1 to 65535")
        require(self.names in (ADDRESS, HOSTNAME), "names", self.names, f"must be {ADDRESS} or {HOSTNAME}")


@dataclass(frozen=True)
class RaySettings:
    """The section [ray] of a fleet file. Relative paths are relative to the file.

    address     of a Ray cluster, HOST:PORT of its head; empty: one on this machine, which `fleet up` starts
    nodes       how many, named node-0, node-1, ...
    grpc_port   of the first node; each further one has the next port, so that machines may have several. The page of
                metrics of each is METRICS_OFFSET above
    cpus, gpus  that Ray reserves for each node
    build       build folder of every machine, with models and server
    folder      of each machine, for the files of its nodes: certificates and keys
    serve       further options of `shapeshift serve` for each node, such as "--models encode"
    Raises InvalidInputError with the name of the field.
    """

    address: str = ""
    nodes: int = 1
    grpc_port: int = 18001
    cpus: float = 1.0
    gpus: float = 0.0
    build: str = "build"
    folder: str = "fleet"
    serve: str = ""

    def __post_init__(self) -> None:
        for name in ("build", "folder"):
            require(bool(getattr(self, name)), name, getattr(self, name), "must name a file or folder")
        require(1 <= self.nodes <= 1000, "nodes", self.nodes, "must be 1 to 1000")
        allowed = f"each node needs a port of 1 to 65535, and that {METRICS_OFFSET} above it"
        require(0 < self.grpc_port <= 65536 - METRICS_OFFSET - self.nodes, "grpc_port", self.grpc_port, allowed)
        for name in ("cpus", "gpus"):
            require(0 <= getattr(self, name) <= 4096, name, getattr(self, name), "must be 0 to 4096")


@dataclass(frozen=True)
class FleetSettings:
    """What a fleet file says.

    name    of the fleet, a DNS label
    tls     files of mutual TLS, `{node}` replaced; None for plain text
    nodes   those of [[nodes]], where the file has them; the file is read again when it changes
    source  the section [dns] or [ray] that says where else the nodes are found; None with [[nodes]]
    """

    name: str
    tls: Tls | None = None
    nodes: tuple[Node, ...] = ()
    source: DnsSettings | RaySettings | None = None


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
def _named(name: str) -> Iterator[None]:
    """While what the section [name] holds is read: an InvalidInputError becomes a ShapeshiftError that names it."""
    try:
        yield
    except InvalidInputError as error:
        raise ShapeshiftError(f"[{name}] {error}") from None


def text(name: str, tls: Tls | None, nodes: Iterable[Node]) -> str:
    """A fleet file with [[nodes]]. Paths are written as they are."""
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
    settings.refuse_unknown(data, ("name", "tls", "nodes", "dns", "ray"))
    name = check_node_name(_text(data, "name"))
    tls = _tls(_table(data, "tls"), folder, node) if "tls" in data else None
    entries = data.get("nodes", [])
    require(isinstance(entries, list), "nodes", entries, "must be written as [[nodes]]")
    listed = [_node(number, entry, folder, tls) for number, entry in enumerate(entries, start=1)]
    nodes = tuple(sorted(listed, key=lambda one: one.name))
    _require_distinct(nodes)
    source: DnsSettings | RaySettings | None = None
    if "dns" in data:
        source = _section(DnsSettings, data, "dns")
    elif "ray" in data:
        source = _section(RaySettings, data, "ray")
    places = [place for place in ("nodes", "dns", "ray") if place in data]
    require(len(places) == 1, "nodes", places, "exactly one of [[nodes]], [dns] and [ray]")
    require(bool(nodes) or source is not None, "nodes", nodes, "at least one of [[nodes]]")
    return FleetSettings(name, tls, nodes, source)


def _section(cls: type[T], data: Mapping[str, Any], name: str) -> T:
    """The settings of the section [name]. Raises ShapeshiftError with the names of section and field."""
    values = _table(data, name)
    with _named(name):
        settings.refuse_unknown(values, settings.names(cls))
        for field, value in values.items():
            require(not isinstance(value, list | dict), field, value, "must be one text or number")
        return settings.read(cls, {field: str(value) for field, value in values.items()})


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
    with _named("tls"):
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


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInputError(name, value, "must be a text that is not empty")
    return value
