"""The panel of a fleet, as one of its nodes sees it: which nodes serve, their load, and the way to them."""

from __future__ import annotations

from typing import NamedTuple

from shapeshift.live.source import LAST_RATE, View
from shapeshift.live.svg import number, table, tile, tiles

NAME = "fleet"
TECHNIQUE = "fleet"
TITLE = "Many servers as one"
IDEA = (
    "Several servers, the nodes, serve the same models. This one serves a request itself, or passes it on to the node"
    " that has least to do. Watch: nodes have about the same load; when one leaves, the others take its requests."
)
# Nodes are recorded twice a second: one that is not for so long has left.
_NOW_S = 3.0


class Node(NamedTuple):
    """What is known of a node: load: requests that wait or run there; hop_ms: the way there and back, 0: this node."""

    name: str
    serves: bool
    load: float
    version: str
    hop_ms: float
    is_member: bool

    @property
    def state(self) -> str:
        if not self.is_member:
            return "has left: drained or stopped"
        return "serves" if self.serves else "does not answer"


def models(view: View) -> list[str]:
    """The models that this panel is about, the busiest first: those that other nodes serve too."""
    return view.busiest(view.page.models_with("fleet_nodes"))


def nodes_of(view: View, model: str) -> list[Node]:
    """The nodes of the last minute, by name."""
    nodes = {}
    for event in view.recent(model, "nodes", view.minute_s):
        for name, serves, load, version, hop_ms in event.values["rows"]:
            nodes[name] = Node(name, serves, load, version, hop_ms, event.at >= view.now - _NOW_S)
    return sorted(nodes.values())


def draw(view: View, model: str) -> str:
    """The panel of one model, as HTML."""
    nodes, change = nodes_of(view, model), view.change
    passed_on = change.by(model, "requests_forwarded_total", "node")
    serving = [node for node in nodes if node.is_member and node.serves]
    versions = {node.version for node in nodes if node.is_member}
    missing = len(nodes) - len(serving)
    passed_rate = sum(passed_on.values()) / change.seconds
    rows = [
        (
            node.name if node.hop_ms else f"{node.name} (this one)",
            node.state,
            number(node.load),
            number(node.hop_ms, "ms") if node.hop_ms else "–",
            number(passed_on.get(node.name, 0.0) / change.seconds),
            node.version,
        )
        for node in nodes
    ]
    return tiles(
        tile(
            "nodes that serve",
            number(len(serving) or view.page.total(model, "fleet_nodes")),
            f"{missing} left or silent" if missing else "",
            "bad" if missing else "good",
        ),
        tile("requests passed on a second", number(passed_rate), f"to other nodes, {LAST_RATE}"),
        tile("requests on other nodes now", number(view.page.total(model, "requests_on_other_nodes"))),
        *([tile("versions", str(len(versions)), "nodes differ: an upgrade?")] if len(versions) > 1 else []),
    ) + table(
        f"Nodes, {view.minute_words}",
        ("node", "state", "requests that wait or run", "way there and back", "passed on to it a second", "version"),
        rows,
        "none was seen: this server records nothing",
    )
