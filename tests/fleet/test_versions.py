"""Which version of its registry each node serves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.cli.fleet.status import format_fleet
from shapeshift.cli.main import main
from shapeshift.errors import EngineError, NotFoundError, TimedOutError
from shapeshift.fleet import registries
from shapeshift.fleet.node import Node
from shapeshift.sidecar import overview
from shapeshift.triton.async_client import ModelCall
from shapeshift.triton.endpoint import Endpoint


class Client:
    """A client of one node. registry: of its front `lora`; down: it does not answer."""

    def __init__(self, registry: str | None, down: bool = False) -> None:
        self.registry, self.down = registry, down
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
        told = {"kind": "generation", "registry": self.registry} if call.model == "lora" else {"kind": "embedding"}
        return {"DESCRIPTION": np.array([[json.dumps(told).encode()]], dtype=object)}

    async def close(self) -> None:
        self.closed = True


def test_fronts_with_a_registry_tell_its_version_and_others_nothing() -> None:
    client = Client("1a2b")
    assert asyncio.run(registries._of_node(client)) == {"lora": "1a2b"}  # type: ignore[arg-type]
    assert client.closed and "encode_w00" not in client.asked


def test_a_node_that_does_not_answer_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = {"h:1": Client("1a2b"), "h:2": Client("1a2b", down=True), "h:3": Client("9f00")}
    monkeypatch.setattr(registries, "AsyncClient", lambda address, tls: clients[address])
    nodes = [Node(name, Endpoint(f"h:{port}"), "http://h:9/metrics") for port, name in enumerate("abc", 1)]
    found = registries.versions(nodes)
    assert found == {"a": {"lora": "1a2b"}, "b": {}, "c": {"lora": "9f00"}}
    assert registries.differing(found) == ["lora: its registry differs by node: a has 1a2b, c has 9f00"]
    assert registries.differing({"a": found["a"], "b": found["b"]}) == []


@pytest.mark.parametrize(
    ("membership", "build"),
    [("static", "build"), ('ray"\n[ray]\nfolder = "machines', "fleets/machines/sidecar")],
    ids=["static", "ray"],
)
def test_the_status_finds_the_sidecar_that_fleet_up_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, build: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fleets").mkdir()
    nodes = '[[nodes]]\nname = "a"\ngrpc = "h:1"\nmetrics = "http://h:2/metrics"\n'
    Path("fleets/fleet.toml").write_text(f'name = "demo"\nmembership = "{membership}"\n{nodes}')
    asked: list[Path] = []

    def note(connections: object, run_directory: Path, *others: object) -> None:
        asked.append(run_directory)
        raise NotFoundError("no server in this test")

    monkeypatch.setattr(overview, "overview", note)
    assert main(["fleet", "status", "fleets/fleet.toml"]) == 2
    assert asked[0].resolve() == tmp_path / build / "fleet" / "demo"
    assert main(["fleet", "status", "fleets/fleet.toml", "--build", "other"]) == 2
    assert asked[1] == Path("other/fleet/demo")


def test_the_status_shows_versions_and_what_differs() -> None:
    node = {"state": "serving", "version": "2.51.0", "workers": 1, "texts_per_s": 0.0, "problem": ""}
    found = {
        "nodes": [{"name": "a", "registries": {"lora": "1a2b"}, **node}, {"name": "b", "registries": {}, **node}],
        "registry_problems": ["lora: differs"],
        "scheduler": {"pid": None, "frozen": False, "decisions": []},
        "fronts": [],
        "workers": [],
        "models": [],
        "problems": {},
    }
    text = format_fleet("demo", found)
    assert "lora 1a2b" in text and "\nlora: differs\n" in text
