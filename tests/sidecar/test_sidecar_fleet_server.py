"""One sidecar over two real Tritons. The order matters: each test starts from what the one before it left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shapeshift.sidecar import run_files
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import ServerSettings
from tests.fleet import fleet_files
from tests.sidecar.project import PATIENCE_S, Command, Project, RunningServer, wait_until

# Two servers whose workers are loaded several times: a minute, more on a busy machine.
pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(300)]
Start = Callable[..., Command]


@dataclass
class Fleet:
    """Two servers with front and workers of the test backend, and the fleet file that names them."""

    file: Path
    build: Path
    nodes: dict[str, RunningServer]

    def workers(self) -> dict[str, str]:
        found = {node: running.workers() for node, running in self.nodes.items()}
        return {f"{node}/{worker}": bin_ for node, bins in found.items() for worker, bin_ in bins.items()}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, server_settings: Callable[..., ServerSettings]) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    projects = {name: Project(folder / name, server_settings) for name in "ab"}
    with TritonServer(projects["a"].settings) as a, TritonServer(projects["b"].settings) as b:
        servers = {"a": a.wait_ready(timeout_s=PATIENCE_S), "b": b.wait_ready(timeout_s=PATIENCE_S)}
        file = folder / "fleet.toml"
        fleet_files.write_servers(file, servers, {name: project.run / "key" for name, project in projects.items()})
        yield Fleet(file, folder / "build", {name: RunningServer(server) for name, server in servers.items()})


@pytest.fixture
def sidecar(fleet: Fleet, command: Start) -> Command:
    # The last option of one name counts.
    return command("sidecar", "--fleet", str(fleet.file), "--build", str(fleet.build))


def test_one_plan_is_loaded_on_both_nodes_and_a_dead_worker_again(fleet: Fleet, sidecar: Command) -> None:
    run_directory = fleet.build / "fleet" / "test"
    # A worker is ready before its load ends: only then does its process stay.
    wait_until(lambda: run_files.read_report(run_directory).get("settled"), "the first plan is loaded")
    assert len(fleet.workers()) == 6
    assert sidecar.output.count("plan enc: ") == 1
    # Each worker was loaded twice: the first process may still be ending.
    wait_until(lambda: len(fleet.nodes["b"].pids().get("enc_w01", ())) == 1, "one process")
    fleet.nodes["b"].kill("enc_w01")
    sidecar.wait_for("health b/enc_w01: loaded in")
    assert fleet.nodes["b"].workers("generation")["enc_w01"] == "1"
    report = run_files.read_report(run_directory)
    assert (report["fleet"], report["plans"]["enc"]["workers"]) == ("test", 6)


def test_a_killed_server_is_planned_around_and_gets_its_workers_back(
    fleet: Fleet, sidecar: Command, tmp_path: Path
) -> None:
    sidecar.wait_for("plan enc: keeps the loaded workers")
    fleet.nodes["b"].server.stop()
    sidecar.wait_for("node b: does not answer, and is planned around")
    sidecar.wait_for("plan enc: node b is lost")
    asked = Command(tmp_path / "status.log", "fleet", "status", str(fleet.file), "--json", "--build", str(fleet.build))
    assert asked.process.wait(timeout=PATIENCE_S) == 0
    found = json.loads(asked.output)
    assert [(one["name"], one["state"], one["workers"]) for one in found["nodes"]] == [
        ("a", "serving", 3),
        ("b", "does not answer", 0),
    ]
    assert found["sidecar"]["decisions"]
    fleet.nodes["b"].server.start().wait_ready(timeout_s=PATIENCE_S)
    sidecar.wait_for("plan enc: node b has joined")
    wait_until(lambda: len(fleet.nodes["b"].workers()) == 3, "the workers of b")
