"""Opens the connections of the sidecar to servers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shapeshift.fleet.membership.open import open_membership
from shapeshift.fleet.node import Node
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.nodes.connections import Connections, FleetConnections, NodeServer, SingleServer
from shapeshift.triton import metrics
from shapeshift.triton.control import ModelControl
from shapeshift.triton.endpoint import tls_from_environment

_LOOPBACK = ("127.", "localhost:", "[::1]:")


def to_server(server: str, page: str, key: str) -> Connections:
    """To the server with model control at `server`, HOST:PORT, and its metrics page at the URL `page`.

    The environment names the certificates, if it asks for them.
    """
    tls = tls_from_environment()
    control = ModelControl(server, key, tls)
    return SingleServer(NodeServer(control, partial(metrics.scrape, page, tls=tls), control.version))


def to_fleet(file: Path, node: str, journal: Journal) -> FleetConnections:
    """To the nodes of the fleet file, now and whenever they change. node: whose certificate is shown to them.

    Raises ShapeshiftError for an invalid file.
    """
    return FleetConnections(open_membership(file, node), _to_node, journal)


def _to_node(node: Node, key: str, host: int) -> NodeServer:
    """The processes of a node at a loopback address may be visible here."""
    address = node.grpc.address
    control = ModelControl(address, key, node.grpc.tls)
    own_host = 0 if address.startswith(_LOOPBACK) else host
    return NodeServer(control, partial(metrics.scrape, node.metrics, tls=node.grpc.tls), control.version, own_host)
