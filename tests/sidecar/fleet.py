"""Fake servers as the nodes of a fleet, or as the single server of none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.nodes.connections import NodeServer
from shapeshift.sidecar.nodes.fleet_control import FleetControl
from shapeshift.sidecar.nodes.fleet_models import FleetModelReader
from shapeshift.sidecar.nodes.fleet_scrape import FleetScrape
from shapeshift.sidecar.nodes.presence import Presence
from shapeshift.triton.metrics import Samples
from tests.sidecar.fakes import FakeServer

# A fake server that does not answer raises at once; only one that hangs reaches this.
LIMIT_S = 0.2


def no_page() -> Samples:
    raise ShapeshiftError("no metrics page")


class FakeFleet:
    """The sidecar's parts that see nodes, over fake servers; a server under the name "" is no node of a fleet."""

    def __init__(
        self,
        servers: Mapping[str, FakeServer],
        write: Callable[[str], None] = lambda text: None,
        pages: Mapping[str, Callable[[], Samples]] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.servers: dict[str, NodeServer] = {}
        self._pages = pages or {}
        for node, server in servers.items():
            self.join(node, server)
        self.presence = Presence(Journal(write, lambda values: None, {}))
        limit_s = None if "" in servers else LIMIT_S
        self.control = FleetControl(self, self.presence, limit_s)
        self.reader = FleetModelReader(self, self.presence, limit_s)
        self.scrape = FleetScrape(self, self.presence, limit_s, clock)

    def join(self, node: str, server: FakeServer) -> None:
        self.servers[node] = NodeServer(
            server, self._pages.get(node, no_page), lambda: "2.51.0", host=len(self.servers)
        )

    def refresh(self) -> None:
        """Nothing: tests change `servers`."""


def single(server: FakeServer, scrape: Callable[[], Samples] = no_page) -> FakeFleet:
    """A server that is no node of a fleet."""
    return FakeFleet({"": server}, pages={"": scrape})
