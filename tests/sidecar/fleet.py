"""Fake servers as the nodes of a fleet, or as the single server of none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.node import Members, Node
from shapeshift.fleet.sidecar.connections import FleetConnections, NodeServer
from shapeshift.fleet.sidecar.fleet import servers_of
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.servers import Servers
from shapeshift.sidecar.workers import ServerModelReader
from shapeshift.triton.endpoint import Endpoint
from shapeshift.triton.metrics import Samples
from tests.fakes import logger
from tests.sidecar.fakes import FakeServer

# A fake server that does not answer raises at once; only one that hangs reaches this.
LIMIT_S = 0.2


def no_page() -> Samples:
    raise ShapeshiftError("no metrics page")


def version() -> str:
    return "2.51.0"


class FakeFleet:
    """The sidecar's parts that see nodes, over fake servers. versions: of nodes that do not say `version`."""

    def __init__(
        self,
        servers: Mapping[str, FakeServer],
        lines: list[str] | None = None,
        pages: Mapping[str, Callable[[], Samples]] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        versions: Mapping[str, Callable[[], str]] | None = None,
    ) -> None:
        self._servers = dict(servers)
        self._pages, self._versions = pages or {}, versions or {}
        journal = Journal(logger(lines), lambda values: None, {})
        self._connections = FleetConnections(self, journal, self._connect)
        self._connections.refresh()
        self.watched = servers_of(self._connections, journal, LIMIT_S, clock=clock)
        self.control, self.reader, self.scrape = self.watched.control, self.watched.reader, self.watched.scrape

    def join(self, node: str, server: FakeServer) -> None:
        self._servers[node] = server
        self._connections.refresh()

    def leave(self, node: str) -> None:
        del self._servers[node]
        self._connections.refresh()

    def members(self) -> Members:
        return Members([Node(name, Endpoint("10.0.0.1:1"), "http://page") for name in self._servers])

    def close(self) -> None:
        """As a membership: nothing is held."""

    def _connect(self, node: Node, key: str, host: int) -> NodeServer:
        found = self._versions.get(node.name, version)
        return NodeServer(self._servers[node.name], self._pages.get(node.name, no_page), found, host - 1)


def single(
    server: FakeServer, scrape: Callable[[], Samples] = no_page, clock: Callable[[], float] = lambda: 0.0
) -> Servers:
    """A server that is no node of a fleet."""
    return Servers(
        server, ServerModelReader(server), lambda: MetricsPage(scrape(), clock()), lambda: ({"": version()}, {})
    )
