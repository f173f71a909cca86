"""All nodes of a fleet, as the sidecar watches and changes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.membership import open_membership
from shapeshift.fleet.sidecar.connections import FleetConnections, NodeServer
from shapeshift.fleet.sidecar.control import FleetControl
from shapeshift.fleet.sidecar.models import FleetModelReader
from shapeshift.fleet.sidecar.node_calls import NodeCalls, Presence, nobody_answers
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.servers import Servers
from shapeshift.sidecar.settings import SidecarSettings

# A node that takes longer to answer is late, and left out.
_LIMIT_S = 0.8


class FleetScrape:
    """One metrics page of all nodes, which are scraped at once. One thread calls it.

    A node that does not answer in time keeps its last page as long as it is a member: its counters stand still, and
    what its front had counted until then is not lost.
    """

    def __init__(
        self,
        connections: FleetConnections,
        presence: Presence,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = connections
        self._presence = presence
        self._calls: NodeCalls[MetricsPage] = NodeCalls(limit_s)
        self._clock = clock
        self._last: dict[str, MetricsPage] = {}

    def __call__(self) -> MetricsPage:
        """The present page; `nodes` are those that answered. Raises ShapeshiftError if none did."""
        self._connections.refresh()
        servers = self._connections.servers
        pages, problems = self._calls.ask({node: partial(self._page, node, one) for node, one in servers.items()})
        self._presence.record("metrics", pages, problems)
        if not pages:
            raise nobody_answers(problems)
        last = self._last | pages
        self._last = {node: last[node] for node in servers if node in last}
        return MetricsPage.joined(self._last.values(), self._clock(), frozenset(pages))

    def _page(self, node: str, server: NodeServer) -> MetricsPage:
        return MetricsPage(server.scrape(), self._clock(), node, server.host)


def servers_of(
    connections: FleetConnections,
    journal: Journal,
    limit_s: float = _LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Servers:
    """All nodes, as the sidecar watches and changes them. limit_s: within which a node answers."""
    presence = Presence(journal)

    def versions() -> tuple[Mapping[str, str], Mapping[str, str]]:
        calls: NodeCalls[str] = NodeCalls(limit_s)
        return calls.ask({node: one.version for node, one in connections.servers.items()})

    return Servers(
        FleetControl(connections, presence, limit_s),
        FleetModelReader(connections, presence, limit_s),
        FleetScrape(connections, presence, limit_s, clock),
        versions,
    )


class Fleet:
    """The fleet of a fleet file. node: whose certificate is shown. Raises as `settings.read` does."""

    def __init__(self, file: Path, node: str) -> None:
        self.name = fleet_settings.read(file, node).name
        self._file = file
        self._node = node

    def connect(self, settings: SidecarSettings, journal: Journal) -> Servers:
        """See `sidecar.servers.Fleet`. Raises ShapeshiftError for an invalid section of the file."""
        connections = FleetConnections(open_membership(self._file, self._node), journal)
        return servers_of(connections, journal)
