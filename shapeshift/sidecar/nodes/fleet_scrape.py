"""One metrics page of all nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from shapeshift.sidecar.nodes.connections import Connections, NodeServer
from shapeshift.sidecar.nodes.node_calls import NodeCalls, nobody_answers
from shapeshift.sidecar.nodes.presence import Presence
from shapeshift.sidecar.observe import MetricsPage


class FleetScrape:
    """Scrapes all nodes at once. One thread calls it.

    A node that does not answer in time keeps its last page as long as it is a member: its counters stand still, and
    what its front had counted until then is not lost.
    """

    def __init__(
        self,
        connections: Connections,
        presence: Presence,
        limit_s: float | None,
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
