"""A fleet on a local Ray: two nodes with emulated engines, their supervisors killed, the head killed, a drain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.fleet.member_load import MemberLoad, steady
from shapeshift.cli.main import main
from shapeshift.fleet import certificates
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.metrics_proxy import CERTIFICATE_EXPIRY
from shapeshift.fleet.supervision.node_process import NodeCommand, NodeProcess
from shapeshift.fleet.supervision.node_supervisor import READY, STOPPED
from shapeshift.fleet.supervision.ray_fleet import FLEET_ACTOR, OPERATOR, RayFleet
from tests import waiting

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(900)]

BUILD = Path(__file__).resolve().parents[2] / "build"
FLEET = """
name = "demo"

[ray]
nodes = 2
cpus = 0.5
grpc_port = {grpc}
build = "{build}"
serve = "--models encode --triton {triton}"
"""
wait_for = partial(waiting.wait_for, pause_s=0.3)


@pytest.fixture(scope="module")
def file(
    tmp_path_factory: pytest.TempPathFactory, emulated_build: Path, free_ports: Callable[[int], list[int]]
) -> Iterator[Path]:
    """The fleet file of a fleet that is up."""
    path = tmp_path_factory.mktemp("ray") / "fleet.toml"
    grpc = free_ports(1)[0]
    path.write_text(FLEET.format(grpc=grpc, build=emulated_build, triton=BUILD / "triton"))
    try:
        assert main(["fleet", "up", str(path), "--no-sidecar"]) == 0
        yield path
    finally:
        main(["fleet", "down", str(path)])


def process(file: Path, name: str) -> NodeProcess:
    """The process of a node, by the record of its run."""
    fleet = RayFleet(file)
    return NodeProcess(NodeCommand(name, file, Path(fleet.settings.build)))


def members(file: Path, name: str) -> list[str]:
    """The nodes in the fleet file that `name` reads."""
    return [one.name for one in fleet_settings.read(file.parent / "fleet" / name / "fleet.toml").nodes]


def load_of(file: Path) -> MemberLoad:
    """Open load on the nodes of the fleet file that node-1 reads."""
    return MemberLoad(file.parent / "fleet" / "node-1" / "fleet.toml", steady(40.0))


def test_every_node_knows_every_other_one(file: Path) -> None:
    for name in ("node-0", "node-1"):
        wait_for(lambda name=name: members(file, name) == ["node-0", "node-1"])  # type: ignore[misc]
    assert len(fleet_settings.read(file.parent / "fleet" / "nodes.toml", OPERATOR).nodes) == 2


def test_a_supervisor_that_is_killed_adopts_its_node(file: Path) -> None:
    fleet = RayFleet(file)
    fleet.connect()
    before = process(file, "node-0").identity
    assert before is not None
    supervisor = fleet.actor_pid("node-0")
    with load_of(file) as load:
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: fleet.statuses(["node-0"]).get("node-0") is not None)
        wait_for(lambda: fleet.statuses(["node-0"])["node-0"].state == "ready")
        assert fleet.actor_pid("node-0") != supervisor
    assert process(file, "node-0").identity == before
    assert fleet.statuses(["node-0"])["node-0"].starts == 0
    assert load.results and load.failed == []


def test_a_certificate_in_its_last_third_is_renewed(file: Path) -> None:
    """`up` sends it to the nodes; the server shows it once it is started again, and its page says so."""
    fleet = RayFleet(file)
    fleet.connect()
    folder = file.parent / "fleet" / "tls"
    old = fleet.page("node-1")[CERTIFICATE_EXPIRY, frozenset()]
    (folder / "node-1.pem").unlink()
    certificates.ensure(folder, "node-1", ["127.0.0.1"], days=0.4)
    assert main(["fleet", "up", str(file), "--no-sidecar"]) == 0
    sent = file.parent / "fleet" / "node-1" / "node-1.pem"
    wait_for(lambda: sent.read_bytes() == (folder / "node-1.pem").read_bytes())
    fleet.drain("node-1", 120.0, print)
    fleet.start(fleet.present_command("node-1"), 300.0, print)
    assert fleet.page("node-1")[CERTIFICATE_EXPIRY, frozenset()] > old
    wait_for(lambda: members(file, "node-0") == ["node-0", "node-1"])


def test_a_drained_node_costs_no_request(file: Path) -> None:
    with load_of(file) as load:
        wait_for(lambda: len(load.results) > 50)
        assert main(["fleet", "drain", str(file), "node-0"]) == 0
        assert process(file, "node-0").identity is None
        assert members(file, "node-1") == ["node-1"]
        assert main(["fleet", "drain", str(file), "node-0", "--undo"]) == 0
        wait_for(lambda: members(file, "node-1") == ["node-0", "node-1"])
        time.sleep(1.0)
    assert len(load.results) > 100 and load.failed == []


def test_a_node_that_is_stated_again_is_started_again(file: Path) -> None:
    assert main(["fleet", "drain", str(file), "node-1"]) == 0
    stated = file.read_text()
    file.write_text(stated.replace("nodes = 2", "nodes = 1"))
    try:
        assert main(["fleet", "up", str(file), "--no-sidecar"]) == 0
        wait_for(lambda: members(file, "node-0") == ["node-0"])
    finally:
        file.write_text(stated)
    assert main(["fleet", "up", str(file), "--no-sidecar"]) == 0
    wait_for(lambda: members(file, "node-0") == ["node-0", "node-1"])


def test_a_new_head_adopts_the_nodes_of_a_lost_one(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [process(file, name).identity for name in ("node-0", "node-1")]
    fleet = RayFleet(file)
    fleet.connect()
    assert None not in before
    with load_of(file) as load:
        fleet.kill_head()
        assert main(["fleet", "drain", str(file), "node-0"]) == 2
        assert "no fleet of" in capsys.readouterr().err
        assert main(["fleet", "up", str(file), "--no-sidecar"]) == 0
        for name in ("node-0", "node-1"):
            wait_for(lambda name=name: members(file, name) == ["node-0", "node-1"])  # type: ignore[misc]
    assert [process(file, name).identity for name in ("node-0", "node-1")] == before
    assert load.results and load.failed == []
    assert len(fleet_settings.read(file.parent / "fleet" / "nodes.toml", OPERATOR).nodes) == 2


def test_a_drain_outlives_the_head(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "drain", str(file), "node-1"]) == 0
    fleet = RayFleet(file)
    fleet.connect()
    fleet.kill_head()
    capsys.readouterr()
    assert main(["fleet", "up", str(file), "--no-sidecar"]) == 0
    assert "node-1: is drained" in capsys.readouterr().out
    fleet = RayFleet(file)
    fleet.connect()
    wait_for(
        lambda: {name: one.state for name, one in fleet.statuses().items()} == {"node-0": READY, "node-1": STOPPED}
    )
    assert fleet.statuses()["node-1"].is_drained
    assert main(["fleet", "drain", str(file), "node-1", "--undo"]) == 0


def test_a_node_that_is_killed_is_started_again(file: Path) -> None:
    fleet = RayFleet(file)
    fleet.connect()
    before = process(file, "node-0").identity
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    wait_for(lambda: process(file, "node-0").identity not in (before, None))
    wait_for(lambda: fleet.statuses(["node-0"])["node-0"].state == "ready")


def test_the_membership_comes_back_with_its_actor(file: Path) -> None:
    fleet = RayFleet(file)
    fleet.connect()
    os.kill(fleet.actor_pid(FLEET_ACTOR), signal.SIGKILL)
    watched = file.parent / "fleet" / "node-1" / "fleet.toml"
    watched.unlink()
    wait_for(watched.is_file)
    assert members(file, "node-1") == ["node-0", "node-1"]
