"""The servers that the sidecar watches: one for each node of a fleet, or a single one, the node without a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.membership.interface import Membership
from shapeshift.fleet.node import Node, doubled
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.workers import Control
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


class Connections(Protocol):
    """servers: by node; any thread may read it. refresh: follow the members; one thread calls it."""

    @property
    def servers(self) -> Mapping[str, NodeServer]: ...

    def refresh(self) -> None: ...


class SingleServer:
    """The server of no fleet."""

    def __init__(self, server: NodeServer) -> None:
        self.servers: Mapping[str, NodeServer] = {"": server}

    def refresh(self) -> None:
        """Nothing changes."""


# Node, its key, its number among the hosts.
Connect = Callable[[Node, str, int], NodeServer]


class FleetConnections:
    """Follows a membership. A node whose address or key has changed gets a new connection. nodes: the present members
    that can be told apart."""

    def __init__(self, membership: Membership, connect: Connect, journal: Journal) -> None:
        self.servers: Mapping[str, NodeServer] = {}
        self.nodes: Sequence[Node] = ()
        self._membership = membership
        self._connect = connect
        self._journal = journal
        self._known: dict[str, tuple[Node, str]] = {}
        self._hosts: dict[str, int] = {}

    def refresh(self) -> None:
        """Connect to new members and forget those that left. A node that cannot be connected to is logged by name."""
        members = self._membership.members()
        if members.problem:
            self._journal.log_once("members", "fleet", members.problem)
        elif self._journal.clear("members", "fleet"):
            self._journal.log("members", "fleet", "can be read again")
        servers, problems = {}, doubled(members.nodes)
        for name, problem in problems.items():
            self._journal.log_once("members", name, f"left out: {problem}")
        self.nodes = [node for node in members.nodes if node.name not in problems]
        for node in self.nodes:
            try:
                servers[node.name] = self._server(node)
            except ShapeshiftError as error:
                self._journal.log_once("members", node.name, f"left out: {error}")
        for name in self._known.keys() - servers.keys():
            del self._known[name]
        self.servers = servers

    def _server(self, node: Node) -> NodeServer:
        key = read_key(node.key_file) if node.key_file else ""
        if self._known.get(node.name) == (node, key):
            return self.servers[node.name]
        host = self._hosts.setdefault(node.name, len(self._hosts) + 1)
        server = self._connect(node, key, host)
        self._known[node.name] = node, key
        self._journal.clear("members", node.name)
        return server
