"""What `fleet up` asks for: nodes, addresses, files; and what it refuses."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from shapeshift.cli.main import main
from shapeshift.errors import ShapeshiftError, UnsupportedError
from shapeshift.fleet import settings
from shapeshift.fleet.node import Node
from shapeshift.fleet.settings import RaySettings
from shapeshift.fleet.supervision.actors import ensure_fleet_file, write_private
from shapeshift.fleet.supervision.plan import FleetPlan, free_host, make_plan, rooms
from shapeshift.fleet.supervision.ray_fleet import RayFleet
from shapeshift.triton.endpoint import Endpoint, Tls

RAY = 'name = "demo"\n[ray]\nnodes = 3\ngrpc_port = 19000\nserve = "--models encode --strict"\n'
GIVEN = '[tls]\nca = "ca.pem"\ncertificate = "{node}.pem"\nkey = "/keys/{node}.key"\n'


def plan_of(
    folder: Path,
    text: str = RAY,
    hosts: tuple[str, ...] = ("10.0.0.1", "10.0.0.2"),
    placed: dict[str, str] | None = None,
) -> FleetPlan:
    file = folder / "fleet.toml"
    file.write_text(text)
    return make_plan(settings.read(file, "{node}"), folder, dict.fromkeys(hosts, 1), placed)


def test_nodes_go_to_the_machines_in_turn_each_with_ports_of_its_own(tmp_path: Path) -> None:
    nodes = plan_of(tmp_path).nodes
    assert [one.node.name for one in nodes] == ["node-0", "node-1", "node-2"]
    assert [one.host for one in nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert [one.node.grpc.address for one in nodes] == ["10.0.0.1:19000", "10.0.0.2:19001", "10.0.0.1:19002"]
    assert nodes[2].node.metrics == "https://10.0.0.1:20002/metrics"
    assert nodes[0].command.options == ("--models", "encode", "--strict")
    assert nodes[0].command.build == tmp_path / "build"


def test_a_machine_has_room_for_as_many_nodes_as_it_has_what_they_reserve(tmp_path: Path) -> None:
    machines: list[tuple[str, dict[str, float]]] = [
        ("10.0.0.2", {"CPU": 4.0, "GPU": 1.0}),
        ("10.0.0.1", {"memory": 1e9}),
        ("10.0.0.3", {"CPU": 8.0}),
        ("10.0.0.3", {"CPU": 3.0}),
    ]
    assert rooms(machines, RaySettings(cpus=2.0)) == {"10.0.0.2": 2, "10.0.0.3": 5}
    assert rooms(machines, RaySettings(cpus=2.0, gpus=1.0)) == {"10.0.0.2": 1}
    assert rooms(machines, RaySettings(cpus=0.0, nodes=7)) == {"10.0.0.1": 7, "10.0.0.2": 7, "10.0.0.3": 14}
    assert rooms(machines, RaySettings(cpus=9.0)) == {}
    with pytest.raises(UnsupportedError, match="no machine of the Ray cluster has cpus = 1 and gpus = 0"):
        plan_of(tmp_path, hosts=())


def test_a_further_node_goes_where_the_fewest_are_and_room_is_left() -> None:
    room = {"a": 1, "b": 2, "c": 2}
    assert free_host(room, ["a", "b"]) == "c"
    assert free_host(room, ["a", "b", "c"]) == "b"
    assert free_host(room, ["a", "b", "b", "c", "c"]) is None


def test_nodes_that_run_stay_on_their_machines(tmp_path: Path) -> None:
    placed = {"node-0": "10.0.0.9", "node-1": "10.0.0.2", "node-3": "10.0.0.1"}
    assert plan_of(tmp_path, placed=placed).hosts == {
        "node-0": "10.0.0.9",
        "node-1": "10.0.0.2",
        "node-2": "10.0.0.1",
    }, "as many as the file says"


def test_a_node_reads_its_file_with_the_certificate_that_was_made_for_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    one = plan.nodes[1]
    folder = one.command.file.parent
    write_private(
        folder, {**one.files, one.command.file.name: plan.fleet_file(["node-1", "node-2"], "node-1").encode()}
    )
    found = settings.read(one.command.file, "node-1")
    assert [node.name for node in found.nodes] == ["node-1", "node-2"]
    assert all(node.key_file is None for node in found.nodes), "a node does not control another"
    assert found.tls is not None
    found.tls.require_files()
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_a_fleet_file_with_other_addresses_of_the_node_is_replaced(tmp_path: Path) -> None:
    before, plan = plan_of(tmp_path, RAY.replace("19000", "20000")), plan_of(tmp_path)
    one = plan.nodes[1]
    write_private(one.command.file.parent, one.files)
    for text in (before.fleet_file(["node-1"], "node-1"), "name = "):
        one.command.file.write_text(text)
        ensure_fleet_file(one, plan)
        (found,) = settings.read(one.command.file, "node-1").nodes
        assert found.grpc.address == "10.0.0.2:19001"
    one.command.file.write_text(plan.fleet_file(["node-0", "node-1"], "node-1"))
    ensure_fleet_file(one, plan)
    assert len(settings.read(one.command.file, "node-1").nodes) == 2, "what is right is kept"


def test_the_nodes_file_has_its_certificates_beside_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RAY + 'folder = "run"\n')
    RayFleet(tmp_path / "fleet.toml").write_nodes_file(plan)
    found = settings.read(tmp_path / "run" / "nodes.toml", "operator")
    assert len(found.nodes) == 3 and found.tls is not None
    found.tls.require_files()


def test_the_sidecar_has_a_key_of_every_node(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    keys = {one.node.name: Path(f"{one.node.name}.control-key") for one in plan.nodes}
    (tmp_path / "own.toml").write_text(plan.fleet_file(["node-0"], "sidecar", keys))
    assert settings.read(tmp_path / "own.toml").nodes[0].key_file == tmp_path / "node-0.control-key"


def test_given_certificates_are_those_of_each_node(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RAY + GIVEN)
    assert plan.nodes[1].files == {}
    assert plan.nodes[1].node.grpc.tls == Tls(tmp_path / "ca.pem", tmp_path / "node-1.pem", Path("/keys/node-1.key"))
    assert not (tmp_path / "fleet").exists()


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    tls = Tls(Path('/a "b"/c\\d.pem'), Path("größe.pem"), Path("key"))
    node = Node("a", Endpoint("127.0.0.1:1", tls), "https://127.0.0.1:2/metrics", Path("/k"))
    (tmp_path / "fleet.toml").write_text(settings.text("demo", tls, [node]), encoding="utf-8")
    found = settings.read(tmp_path / "fleet.toml")
    assert found.tls == Tls(tls.ca, tmp_path / "größe.pem", tmp_path / "key")
    assert (found.nodes[0].name, found.nodes[0].key_file) == ("a", Path("/k"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 0", "nodes: got 0"),
        ("nodes = 2\ngrpc_port = 65535", "grpc_port: got 65535"),
        ("grpc_port = 64600", "grpc_port: got 64600"),
        ("metrics_port = 108", "the page of a node is 1000 above its grpc_port"),
        ("cpus = -1", "cpus: got -1"),
        ('build = ""', "build: got ''"),
        ("nodes = 2\nmin_nodes = 1", "this setting is gone: `nodes` is how many"),
        ("nodes = 2\nmax_nodes = 3", "this setting is gone: a fleet on Ray has `nodes`"),
        ('serve = ["--models", "encode"]', r"serve: got \['--models', 'encode'\]; must be one text or number"),
        ("node = 3", "unknown parameter; .*did you mean nodes"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "fleet.toml").write_text(f'name = "demo"\n[ray]\n{text}\n')
    with pytest.raises(ShapeshiftError, match=said):
        RayFleet(tmp_path / "fleet.toml")


@pytest.mark.parametrize("command", [["up"], ["down"], ["upgrade"], ["drain", "a"]])
def test_a_fleet_without_ray_is_refused(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        'name = "demo"\n[[nodes]]\nname = "a"\ngrpc = "127.0.0.1:1"\nmetrics = "http://127.0.0.1:2/metrics"\n'
    )
    assert main(["fleet", command[0], str(file), *command[1:]]) == 2
    assert "this command needs a section [ray]" in capsys.readouterr().err


def test_a_fleet_that_is_not_up_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.toml").write_text(RAY)
    assert main(["fleet", "drain", str(tmp_path / "fleet.toml"), "node-0"]) == 2
    assert "start it with `shapeshift fleet up`" in capsys.readouterr().err
    assert main(["fleet", "down", str(tmp_path / "fleet.toml")]) == 0
