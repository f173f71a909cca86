"""Connections of the sidecar: which processes may be visible here, and what a fleet file opens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.fleet.node import Members, Node
from shapeshift.fleet.sidecar.connections import FleetConnections, NodeServer, to_node
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.servers import connect, open_fleet
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.embedded.free_ports import free_ports
from shapeshift.triton.endpoint import Endpoint
from tests.fakes import logger
from tests.sidecar.fakes import FakeServer
from tests.sidecar.fleet import no_page


def quiet(log: list[str] | None = None) -> Journal:
    return Journal(logger(log), lambda values: None, {})


@pytest.mark.parametrize(
    ("address", "host"),
    [("127.0.0.1:1", 0), ("127.8.0.1:1", 0), ("localhost:1", 0), ("[::1]:1", 0), ("10.0.0.1:1", 3), ("local:1", 3)],
)
def test_only_processes_behind_a_loopback_address_may_be_visible_here(address: str, host: int) -> None:
    assert to_node(Node("a", Endpoint(address), "http://page"), "key", 3).host == host


def test_a_fleet_is_followed_by_its_file(tmp_path: Path) -> None:
    """Nobody listens: the nodes are those that do not answer."""
    file = tmp_path / "fleet.toml"
    (port,) = islice(free_ports(), 1)

    def state(*names: str) -> None:
        nodes = [
            Node(name, Endpoint(f"127.0.0.{at}:1"), f"http://127.0.0.{at}:{port}") for at, name in enumerate(names, 1)
        ]
        file.write_text(settings.text("demo", None, nodes))

    state("a", "b")
    fleet = open_fleet(file, "")
    assert fleet.name == "demo"
    servers = fleet.connect(SidecarSettings(run_directory=tmp_path), quiet())
    with pytest.raises(ShapeshiftError, match=r"^a: .*; b: "):
        servers.scrape()
    state("a", "c", "d")
    with pytest.raises(ShapeshiftError, match=r"^a: .*; c: .*; d: "):
        servers.scrape()


def test_a_server_of_no_fleet_is_the_node_without_a_name() -> None:
    (port,) = islice(free_ports(), 1)
    servers = connect("127.0.0.1:1", f"http://127.0.0.1:{port}/metrics", "key")
    assert servers.versions()[1].keys() == {""}
    with pytest.raises(ShapeshiftError, match=str(port)):
        servers.scrape()


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

    return FleetConnections(members, quiet(log), to), made


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
    assert log == [
        "members fleet: the file cannot be read",
        "members fleet: can be read again",
    ]


def test_every_name_that_is_there_twice_is_said() -> None:
    log: list[str] = []
    members = Changing(*named("a", "b", "a", "b"), *named("c"))
    connections, made = following(members, log)
    connections.refresh()
    assert made == ["c1"] and [name in "".join(log) for name in ("members a:", "members b:")] == [True, True]
