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

Relative paths are relative to the file. `{node}` stands for the name of the node that reads the file.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeshift import settings
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.fleet.node import Node, check_node_name
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


def _parse(data: dict[str, Any], folder: Path, node: str) -> FleetSettings:
    settings.refuse_unknown(data, ("name", "membership", "tls", "nodes", "dns", "ray"))
    name = check_node_name(_text(data, "name"))
    membership = _text(data, "membership", "static")
    require(membership in MEMBERSHIPS, "membership", membership, f"must be one of {', '.join(MEMBERSHIPS)}")
    tls = _tls(_table(data, "tls"), folder, node) if "tls" in data else None
    entries = data.get("nodes", [])
    require(isinstance(entries, list), "nodes", entries, "must be written as [[nodes]]")
    found = [_node(number, entry, folder, tls) for number, entry in enumerate(entries, start=1)]
    nodes = tuple(sorted(found, key=lambda one: one.name))
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
