"""Which versions of Shapeshift, engines and registries each node serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from shapeshift.errors import EngineError, TimedOutError
from shapeshift.fleet import settings
from shapeshift.fleet.cli import versions
from shapeshift.fleet.cli.status import format_fleet, sidecar_directory
from shapeshift.fleet.cli.versions import FrontVersions
from shapeshift.fleet.node import Node
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.triton.endpoint import Endpoint


class Client:
    """A client of one node. told: what its front `lora` says; down: it does not answer."""

    def __init__(self, told: dict[str, str], down: bool = False) -> None:
        self.told, self.down = told, down
        self.asked: list[str] = []
        self.closed = False

    async def models(self, timeout_s: float) -> list[str]:
        if self.down:
            raise TimedOutError("no answer")
        return ["encode", "encode_w00", "lora", "other"]

    async def first(self, call: ModelCall) -> dict[str, Any]:
        self.asked.append(call.model)
        if call.model == "lora" and "TEXT" not in call.inputs:
            raise EngineError("expected 1 inputs but got 0")
        if call.model == "other":
            raise TimedOutError("busy")
        told = self.told if call.model == "lora" else {"shapeshift": "0.2.0", "engines": "77aa"}
        return {"DESCRIPTION": np.array([[json.dumps(told).encode()]], dtype=object)}

    async def close(self) -> None:
        self.closed = True


LORA = {"shapeshift": "0.2.0", "checkpoint_version": "c0de", "registry": "1a2b"}
ENCODE = FrontVersions("0.2.0", "77aa")


def read(**clients: Client) -> dict[str, dict[str, FrontVersions]]:
    """The versions of nodes with these names."""
    nodes = [Node(name, Endpoint("h:1"), "http://h:9/metrics") for name in clients]
    return versions.read(nodes, lambda node: cast(AsyncClient, clients[node.name]))


def test_fronts_tell_their_versions_and_others_nothing() -> None:
    client = Client(LORA)
    assert read(a=client)["a"] == {"encode": ENCODE, "lora": FrontVersions("0.2.0", "c0de", "1a2b")}
    assert client.closed and "encode_w00" not in client.asked


def test_a_front_of_an_older_version_says_less() -> None:
    found = read(a=Client({"kind": "generation"}))["a"]
    assert found["lora"] == FrontVersions("untold") and versions.software(found) == "0.2.0, untold"


def test_a_node_that_does_not_answer_has_no_version() -> None:
    other = {**LORA, "registry": "9f00", "checkpoint_version": "c0fe", "shapeshift": "0.3.0"}
    found = read(a=Client(LORA), b=Client(LORA, down=True), c=Client(other))
    assert found["a"] == {"encode": ENCODE, "lora": FrontVersions("0.2.0", "c0de", "1a2b")} and found["b"] == {}
    assert versions.differing(found) == [
        "Shapeshift differs by node: a has 0.2.0, c has 0.2.0, 0.3.0",
        "lora: its engines differ by node: a has c0de, c has c0fe",
        "lora: its registry differs by node: a has 1a2b, c has 9f00",
    ]
    assert versions.differing({"a": found["a"], "b": found["b"]}) == []
    untold = {"a": {"lora": FrontVersions("0.2.0", "c0de", "1a2b")}, "c": {"lora": FrontVersions("0.2.0", "c0de")}}
    assert versions.differing(untold) == []


NODE = '[[nodes]]\nname = "a"\ngrpc = "h:1"\nmetrics = "http://h:2/metrics"\n'


@pytest.mark.parametrize(
    ("source", "build"),
    [(NODE, "build"), ('[ray]\nfolder = "machines"\n', "fleets/machines/sidecar")],
    ids=["nodes", "ray"],
)
def test_the_status_finds_the_sidecar_that_fleet_up_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, build: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("fleets/fleet.toml")
    file.parent.mkdir()
    file.write_text(f'name = "demo"\n{source}')
    fleet = settings.read(file)
    assert sidecar_directory(file, fleet).resolve() == tmp_path / build / "fleet" / "demo"
    assert sidecar_directory(file, fleet, Path("other")) == Path("other/fleet/demo")


def test_the_status_shows_versions_and_what_differs() -> None:
    node = {"state": "serving", "version": "2.51.0", "workers": 1, "texts_per_s": 0.0, "problem": ""}
    told = {"shapeshift": "0.2.0", "engines": {"encode": "77aa"}, "registries": {"lora": "1a2b"}}
    silent: dict[str, Any] = {"shapeshift": None, "engines": {}, "registries": {}}
    found = {
        "nodes": [{"name": "a", **told, **node}, {"name": "b", **silent, **node}],
        "version_problems": ["lora: differs"],
        "sidecar": {"pid": None, "frozen": False, "decisions": []},
        "fronts": [],
        "workers": [],
        "models": [],
        "problems": {},
    }
    rows = [line.split() for line in format_fleet("demo", found).splitlines()]
    assert ["a", "serving", "2.51.0", "0.2.0", "1", "0.0", "encode", "77aa", "lora", "1a2b"] in rows
    assert ["b", "serving", "2.51.0", "-", "1", "0.0", "-", "-"] in rows
    assert ["lora:", "differs"] in rows
