"""The servers that the sidecar of a fleet watches: one for each node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.node import Membership, Node, doubled
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.workers import Control
from shapeshift.triton import metrics
from shapeshift.triton.control import ModelControl
from shapeshift.triton.keys import read_key
from shapeshift.triton.metrics import Samples


@dataclass(frozen=True)
class NodeServer:
    """One server. control: its model control; scrape: reads its metrics page; version: of the server; all raise
    ShapeshiftError.

    host: 0 if its processes may be visible here, else a number of its own.
    """

    control: Control
    scrape: Callable[[], Samples]
    version: Callable[[], str]
    host: int = 0


def to_node(node: Node, key: str, host: int) -> NodeServer:
    """The server of a node. host: its number among the hosts; a node at a loopback address may be visible here."""
    control = ModelControl(node.grpc.address, key, node.grpc.tls)
    scrape = partial(metrics.scrape, node.metrics, tls=node.grpc.tls)
    return NodeServer(control, scrape, control.version, 0 if node.grpc.is_local else host)


class FleetConnections:
    """Follows a membership: one thread calls `refresh`. A node whose address or key has changed gets a new connection.

    servers: by node; any thread may read it. nodes: the present members that can be told apart. connect: to a node,
    with its key and its number among the hosts.
    """

    def __init__(
        self, membership: Membership, journal: Journal, connect: Callable[[Node, str, int], NodeServer] = to_node
    ) -> None:
        self.servers: Mapping[str, NodeServer] = {}
        self.nodes: Sequence[Node] = ()
        self._membership = membership
        self._connect = connect
        self._journal = journal
        self._connected: dict[str, tuple[Node, str]] = {}
        self._hosts: dict[str, int] = {}

    def refresh(self) -> None:
        """Connect to new members and forget those that left. A node that cannot be connected to is logged by name."""
        members = self._membership.members()
        if members.problem:
            self._journal.log_once("members", "fleet", members.problem, logging.WARNING)
        elif self._journal.clear("members", "fleet"):
            self._journal.log("members", "fleet", "can be read again")
        servers, problems = {}, doubled(members.nodes)
        for name, problem in problems.items():
            self._journal.log_once("members", name, f"left out: {problem}", logging.WARNING)
        self.nodes = [node for node in members.nodes if node.name not in problems]
        for node in self.nodes:
            try:
                servers[node.name] = self._server(node)
            except ShapeshiftError as error:
                self._journal.log_once("members", node.name, f"left out: {error}", logging.WARNING)
        for name in self._connected.keys() - servers.keys():
            del self._connected[name]
        self.servers = servers

    def _server(self, node: Node) -> NodeServer:
        key = read_key(node.key_file) if node.key_file else ""
        if self._connected.get(node.name) == (node, key):
            return self.servers[node.name]
        host = self._hosts.setdefault(node.name, len(self._hosts) + 1)
        server = self._connect(node, key, host)
        self._connected[node.name] = node, key
        self._journal.clear("members", node.name)
        return server
