"""Membership by DNS and by a written file, and the choice among the kinds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.membership import DnsMembership, hostname_of, open_membership
from shapeshift.fleet.node import Members, Membership
from shapeshift.fleet.settings import DnsSettings
from shapeshift.triton.endpoint import Tls

NODE = '[[nodes]]\nname = "a"\ngrpc = "10.0.0.1:8001"\nmetrics = "http://10.0.0.1:8002/metrics"\n'
SERVICE = "shapeshift.default.svc"


class FakeResolver:
    """Answers from `names`, the hostnames by address; an OSError in the place of any answer is raised."""

    def __init__(self, **names: str | OSError) -> None:
        self.names: dict[str, str | OSError] = dict(names)
        self.failure: OSError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def addresses(self, host: str) -> list[str]:
        assert host == SERVICE
        self.gate.wait(30.0)
        if self.failure is not None:
            raise self.failure
        return sorted(self.names)

    def hostname(self, address: str) -> str:
        found = self.names[address]
        if isinstance(found, OSError):
            raise found
        return found


def names_of(members: Members) -> list[str]:
    return [node.name for node in members.nodes]


def until(membership: Membership, names: list[str]) -> Members:
    """The members, once they have these names."""
    end = time.monotonic() + 120
    while names_of(members := membership.members()) != names:
        assert time.monotonic() < end, members
        time.sleep(0.01)
    return members


def opened(resolver: FakeResolver, tls: Tls | None = None, **section: object) -> DnsMembership:
    options = DnsSettings(SERVICE, **section)  # type: ignore[arg-type]
    return DnsMembership(options, tls, Path("/fleet"), resolver.addresses, resolver.hostname, period_s=0.1)


def test_nodes_are_named_by_their_addresses() -> None:
    resolver = FakeResolver(**{"10.0.0.9": "", "10.0.0.7": "", "fd00::7": ""})
    membership = opened(resolver, key_file="keys/{node}", grpc_port=9001)
    members = until(membership, ["10-0-0-7", "10-0-0-9", "fd00-0000-0000-0000-0000-0000-0000-0007"])
    assert members.problem == ""
    assert [node.grpc.address for node in members.nodes] == ["10.0.0.7:9001", "10.0.0.9:9001", "[fd00::7]:9001"]
    assert members.nodes[0].metrics == "http://10.0.0.7:8002/metrics"
    assert members.nodes[0].key_file == Path("/fleet/keys/10-0-0-7")
    membership.close()


def test_the_name_is_looked_up_again() -> None:
    resolver = FakeResolver(**{"10.0.0.7": ""})
    membership = opened(resolver)
    until(membership, ["10-0-0-7"])
    resolver.names = {"10.0.0.8": ""}
    until(membership, ["10-0-0-8"])
    membership.close()


def test_hostnames_are_names_and_addresses_of_nodes() -> None:
    resolver = FakeResolver(**{"10.0.0.7": f"pod-1.{SERVICE}", "10.0.0.8": f"pod-0.{SERVICE}"})
    tls = Tls(Path("ca"), Path("certificate"), Path("key"))
    membership = opened(resolver, tls, names="hostname")
    members = until(membership, ["pod-0", "pod-1"])
    assert members.nodes[0].grpc.address == f"pod-0.{SERVICE}:8001"
    assert members.nodes[0].grpc.tls == tls
    assert members.nodes[0].metrics == f"https://pod-0.{SERVICE}:8002/metrics"
    membership.close()


@pytest.mark.parametrize("failure", [None, OSError("temporary failure")])
def test_an_empty_or_failed_answer_keeps_the_last_nodes(failure: OSError | None) -> None:
    resolver = FakeResolver(**{"10.0.0.7": ""})
    membership = opened(resolver)
    until(membership, ["10-0-0-7"])
    resolver.failure, resolver.names = failure, {}
    members = membership.look_up()
    assert names_of(members) == ["10-0-0-7"]
    assert members.problem == (
        f"{SERVICE} could not be looked up: temporary failure" if failure else f"{SERVICE} has no addresses"
    )
    membership.close()


def test_an_address_without_a_name_is_left_out_and_a_known_one_stays() -> None:
    names: dict[str, str | OSError] = {"10.0.0.7": f"pod-0.{SERVICE}", "10.0.0.8": OSError("no name")}
    resolver = FakeResolver(**names)
    membership = opened(resolver, names="hostname")
    members = until(membership, ["pod-0"])
    assert members.problem == "10.0.0.8 is left out: no name"
    resolver.names["10.0.0.7"] = OSError("no answer")
    assert names_of(membership.look_up()) == ["pod-0"]
    resolver.names = {"10.0.0.7": f"pod-0.{SERVICE}", "10.0.0.9": "pod-0.another", "10.0.0.8": "pod_1"}
    members = membership.look_up()
    assert [node.grpc.address for node in members.nodes] == [f"pod-0.{SERVICE}:8001"]
    assert "10.0.0.9 is left out: another node is named pod-0" in members.problem
    assert "10.0.0.8 is left out: node: got 'pod_1'" in members.problem
    membership.close()


def test_a_slow_answer_holds_nobody_up_and_is_reported() -> None:
    resolver = FakeResolver(**{"10.0.0.7": ""})
    clock = [0.0]
    own = DnsSettings(SERVICE)
    resolver.gate.clear()
    membership = DnsMembership(own, None, Path(), resolver.addresses, resolver.hostname, lambda: clock[0], period_s=0.1)
    assert membership.members() == Members(problem=f"{SERVICE} is being looked up")
    resolver.gate.set()
    until(membership, ["10-0-0-7"])
    resolver.gate.clear()
    clock[0] = 3.0
    members = membership.members()
    assert names_of(members) == ["10-0-0-7"]
    assert members.problem == f"{SERVICE}: no answer of DNS for 3 s"
    membership.close()
    resolver.gate.set()


def test_the_resolver_of_this_machine_answers() -> None:
    own = DnsSettings("localhost")
    membership = DnsMembership(own, None, Path())
    end = time.monotonic() + 120
    while not (found := {node.grpc.address for node in membership.members().nodes}):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert found <= {"127.0.0.1:8001", "[::1]:8001"}
    membership.close()
    assert hostname_of("127.0.0.1")


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("[dns]\n", "service"),
        ('[dns]\nservice = "a b"', "service: got 'a b'"),
        ('[dns]\nservice = ["a"]', "service"),
        ('[dns]\nservice = "a"\ngrpc_port = 0', "grpc_port: got 0"),
        ('[dns]\nservice = "a"\nmetrics_port = "http"', "metrics_port: got 'http'"),
        ('[dns]\nservice = "a"\nnames = "srv"', "must be address or hostname"),
        ('[dns]\nservce = "a"', "did you mean service?"),
        ("[ray]\nnodes = 0", "nodes: got 0"),
        ('[ray]\nnodes = "many"', "nodes: got 'many'"),
        ('[ray]\nserve = ["a"]', "serve: got ['a']; must be one text or number"),
        ("[ray]\nnode = 1", "did you mean nodes?"),
    ],
)
def test_an_invalid_section_is_refused_by_file_section_and_field(tmp_path: Path, section: str, named: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'name = "demo"\n{section}\n')
    with pytest.raises(ShapeshiftError) as refused:
        open_membership(file)
    assert str(refused.value).startswith(f"{file}: {section[:5]} ") and named in str(refused.value)


def test_the_section_of_the_fleet_file_chooses(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    kinds = []
    for section in (NODE, '[dns]\nservice = "localhost"\n', "[ray]\n"):
        file.write_text(f'name = "demo"\n{section}')
        membership = open_membership(file)
        kinds.append(type(membership).__name__)
        membership.close()
    assert kinds == ["FileMembership", "DnsMembership", "FileMembership"]


def test_nodes_that_a_supervisor_writes_appear_when_it_has(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('name = "demo"\n[ray]\nfolder = "run"\n')
    membership = open_membership(file)
    written = tmp_path / "run" / "nodes.toml"
    assert membership.members() == Members(problem=f"no fleet file at {written}")
    written.parent.mkdir()
    written.write_text('name = "demo"\n' + NODE)
    assert names_of(membership.members()) == ["a"]
    written.write_text("name = ")
    members = membership.members()
    assert names_of(members) == ["a"] and members.problem
