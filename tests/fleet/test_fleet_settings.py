"""The fleet file and membership by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.fleet.membership import FileMembership
from shapeshift.triton import names

NODE = '[[nodes]]\nname = "{name}"\ngrpc = "10.0.0.{number}:8001"\nmetrics = "http://10.0.0.{number}:8002/metrics"\n'


def nodes(*names: str) -> str:
    return "".join(NODE.format(name=name, number=number) for number, name in enumerate(names))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text('name = "demo"\n' + nodes("b", "a"))
    return path


def test_nodes_come_in_the_order_of_their_names(file: Path) -> None:
    assert [one.name for one in settings.read(file).nodes] == ["a", "b"]


def test_paths_are_relative_to_the_file_and_name_the_node(file: Path) -> None:
    tls = '[tls]\nca = "ca.pem"\ncertificate = "{node}.pem"\nkey = "/keys/{node}.key"\n'
    file.write_text('name = "demo"\n' + nodes("a") + 'key_file = "a.key"\n' + tls)
    found = settings.read(file, "a")
    assert found.tls is not None
    assert (found.tls.ca, found.tls.certificate) == (file.parent / "ca.pem", file.parent / "a.pem")
    assert found.tls.key == Path("/keys/a.key")
    assert found.nodes[0].grpc.tls == found.tls
    assert found.nodes[0].key_file == file.parent / "a.key"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name = 1", "name: got 1"),
        ('name = "demo"', "nodes"),
        ('name = "Demo"\n' + nodes("a"), "node: got 'Demo'"),
        ('nam = "demo"', "did you mean name?"),
        ('name = "demo"\n' + nodes("a", "a"), "node a: name: got 'a'; another node has the same"),
        ('name = "demo"\n' + nodes("a").replace("grpc", "grcp"), "did you mean grpc?"),
        ('name = "demo"\n' + nodes("a").replace(":8001", ""), "grpc: got '10.0.0.0'"),
        (
            'name = "demo"\n' + nodes("a", "b").replace(":8001", "").replace('10.0.0.0"', '10.0.0.0:8001"'),
            "number 2, b: grpc",
        ),
        ('name = "demo"\n[[nodes]]\nnmae = "a"', "[[nodes]] number 1, without a name: nmae"),
        ('name = "demo"\n' + nodes("a").replace("http:", "ftp:"), "node a: metrics"),
        ('name = "demo"\nmembership = "static"\n' + nodes("a"), "this setting is gone: leave it out"),
        ('name = "demo"\n[ray]\nnodes = 1\n' + nodes("a"), "exactly one of [[nodes]], [dns] and [ray]"),
        ('name = "demo"\n[dns]\nservice = "a"\n[ray]\n', "exactly one of [[nodes]], [dns] and [ray]"),
        ('name = "demo"\nnodes = "a"\n', "[[nodes]]"),
        ('name = "demo"\ntls = "a"\n' + nodes("a"), "[tls]"),
        ('name = "demo"\n[tls]\nca = 1\n' + nodes("a"), "[tls] ca: got 1"),
        ('name = "demo"\n[tls]\ncert = "a"\n' + nodes("a"), "[tls] cert: got 'cert'; unknown parameter"),
        ("name = ", "Invalid value"),
    ],
)
def test_an_invalid_file_is_refused_by_file_and_field(file: Path, text: str, named: str) -> None:
    file.write_text(text)
    with pytest.raises(ShapeshiftError) as caught:
        settings.read(file)
    assert str(file) in str(caught.value)
    assert named in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no fleet file"):
        settings.read(tmp_path / "none.toml")


def test_a_changed_file_is_read_again_and_an_invalid_one_changes_nothing(file: Path) -> None:
    membership = FileMembership(file)
    replace(file, 'name = "demo"\n' + nodes("a", "b", "c"))
    assert [one.name for one in membership.members().nodes] == ["a", "b", "c"]
    replace(file, "name = ")
    found = membership.members()
    assert [one.name for one in found.nodes] == ["a", "b", "c"]
    assert str(file) in found.problem
    replace(file, 'name = "demo"\n' + nodes("c"))
    assert [one.name for one in membership.members().nodes] == ["c"]
    assert membership.members().problem == ""


def test_a_model_of_the_fleet_is_named_by_node_and_model() -> None:
    assert names.split(names.qualified("a", "encode_w00")) == ("a", "encode_w00")
    assert names.split(names.qualified("", "encode")) == ("", "encode")


def replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)
