"""Connections of the sidecar: which processes may be visible here, and what a fleet file opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shapeshift.fleet.membership.interface import Members
from shapeshift.fleet.node import Node
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.nodes import connect
from shapeshift.sidecar.nodes.connections import FleetConnections, NodeServer
from shapeshift.triton.endpoint import Endpoint
from shapeshift.triton.metrics import Samples
from tests.sidecar.fakes import FakeServer
from tests.sidecar.fleet import no_page


class FakeControl:
    def __init__(self, address: str, key: str, tls: Any) -> None:
        self.given = address, key, tls

    def version(self) -> str:
        return "24.10"


@pytest.fixture
def scraped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The pages that were read."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setattr(connect, "ModelControl", FakeControl)

    def scrape(page: str, tls: Any) -> Samples:
        found.append((page, tls))
        return {}

    monkeypatch.setattr(connect.metrics, "scrape", scrape)
    return found


@pytest.mark.parametrize(
    ("address", "host"),
    [("127.0.0.1:1", 0), ("127.8.0.1:1", 0), ("localhost:1", 0), ("[::1]:1", 0), ("10.0.0.1:1", 3), ("local:1", 3)],
)
def test_only_processes_behind_a_loopback_address_may_be_visible_here(
    scraped: list[Any], address: str, host: int
) -> None:
    made = connect._to_node(Node("a", Endpoint(address), "http://page"), "key", 3)
    assert isinstance(made.control, FakeControl)
    assert (made.host, made.control.given, made.version()) == (host, (address, "key", None), "24.10")
    made.scrape()
    assert scraped == [("http://page", None)]


def test_a_server_of_no_fleet_is_the_node_without_a_name(scraped: list[Any]) -> None:
    found = connect.to_server("10.0.0.1:1", "http://page", "key")
    found.refresh()
    (made,) = found.servers.values()
    assert list(found.servers) == [""] and made.host == 0
    made.scrape()
    assert scraped == [("http://page", None)] and made.version() == "24.10"


def test_a_fleet_is_followed_by_its_file(scraped: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Path, str]] = []

    class Listed:
        def members(self) -> Members:
            return Members([Node("a", Endpoint("10.0.0.1:1"), "http://page")])

    def open_membership(file: Path, node: str) -> Listed:
        opened.append((file, node))
        return Listed()

    monkeypatch.setattr(connect, "open_membership", open_membership)
    connections = connect.to_fleet(Path("fleet.toml"), "a", Journal(print, lambda values: None, {}))
    connections.refresh()
    assert opened == [(Path("fleet.toml"), "a")] and connections.servers["a"].host == 1


# A fleet whose members change.


class Changing:
    """Members that a test sets."""

    def __init__(self, *nodes: Node) -> None:
        self.now = Members(nodes)

    def members(self) -> Members:
        return self.now

    def close(self) -> None:
        """Nothing is held."""


def following(members: Changing, log: list[str]) -> tuple[FleetConnections, list[str]]:
    """The connections, and the nodes that were connected to, in order."""
    made: list[str] = []

    def to(node: Node, key: str, host: int) -> NodeServer:
        made.append(f"{node.name}{host}")
        return NodeServer(FakeServer(), no_page, str, host)

    return FleetConnections(members, to, Journal(log.append, lambda values: None, {})), made


def named(*names: str, port: int = 1) -> Sequence[Node]:
    return [Node(name, Endpoint(f"10.0.0.1:{port}"), "http://page") for name in names]


def test_a_node_that_comes_back_keeps_its_number_and_gets_a_new_connection() -> None:
    members = Changing(*named("a", "b"))
    connections, made = following(members, [])
    connections.refresh()
    connections.refresh()
    members.now = Members(named("b"))
    connections.refresh()
    assert list(connections.servers) == ["b"] and [node.name for node in connections.nodes] == ["b"]
    members.now = Members(named("a", "b", "c"))
    connections.refresh()
    assert made == ["a1", "b2", "a1", "c3"]


def test_a_file_that_can_be_read_again_is_said_once() -> None:
    log: list[str] = []
    members = Changing(*named("a"))
    connections, _ = following(members, log)
    connections.refresh()
    members.now = Members(named("a"), "the file cannot be read")
    for _ in range(2):
        connections.refresh()
    members.now = Members(named("a"))
    for _ in range(2):
        connections.refresh()
    assert [line.split(" ", 1)[1].strip() for line in log] == [
        "members fleet: the file cannot be read",
        "members fleet: can be read again",
    ]


def test_every_name_that_is_there_twice_is_said() -> None:
    log: list[str] = []
    members = Changing(*named("a", "b", "a", "b"), *named("c"))
    connections, made = following(members, log)
    connections.refresh()
    assert made == ["c1"] and [name in "".join(log) for name in ("members a:", "members b:")] == [True, True]
