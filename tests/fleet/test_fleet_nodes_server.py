"""Two real nodes that `shapeshift serve --fleet` starts: only holders of a certificate of the fleet reach them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.errors import ShapeshiftError, UnsupportedError
from shapeshift.fleet import certificates
from shapeshift.fleet.node import Node
from shapeshift.triton import keys, metrics
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.triton.control import ModelControl
from shapeshift.triton.embedded import run_record
from shapeshift.triton.endpoint import Endpoint
from tests import waiting

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fleet.conftest import Nodes

wait_for = partial(waiting.wait_for, pause_s=0.2)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

CALL = ModelCall(
    "encode", {"INPUT_IDS": np.array([[101, 7592, 102]]), "ATTENTION_MASK": np.ones((1, 3), np.int64)}, 10.0
)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


async def ask(endpoint: Endpoint, call: ModelCall = CALL) -> Any:
    client = AsyncClient(endpoint.address, endpoint.tls)
    try:
        return await client.infer(call)
    finally:
        await client.close()


def one(nodes: Nodes, name: str) -> Node:
    return next(node for node in nodes.settings("a").nodes if node.name == name)


def has_started(nodes: Nodes, name: str) -> bool:
    return "ready: " in nodes.log(name) or nodes.processes[name].poll() is not None


@pytest.fixture(scope="module")
def ready(nodes: Nodes) -> Nodes:
    for name in "ab":
        wait_for(partial(has_started, nodes, name))
        assert nodes.processes[name].poll() is None, nodes.log(name)
    return nodes


def test_a_holder_of_a_certificate_reaches_every_node(ready: Nodes) -> None:
    tls = ready.settings("a").tls
    for name in "ab":
        node = one(ready, name)
        assert run(ask(node.grpc))["EMBEDDING"].shape == (1, 8)
        assert any(series.startswith("nv_inference") for series, _ in metrics.scrape(node.metrics, tls=tls))
        assert node.key_file is not None
        with ModelControl(node.grpc.address, keys.read_key(node.key_file), tls) as control:
            assert control.is_ready("encode")
            control.load("encode")


def test_the_key_of_one_node_does_not_control_another(ready: Nodes) -> None:
    a, b = one(ready, "a"), one(ready, "b")
    assert a.key_file is not None
    with (
        ModelControl(b.grpc.address, keys.read_key(a.key_file), b.grpc.tls) as control,
        pytest.raises(UnsupportedError, match="key"),
    ):
        control.load("encode")


def test_others_reach_no_node(ready: Nodes, tmp_path: Path) -> None:
    grpc = one(ready, "b").grpc
    stranger = certificates.ensure(tmp_path, "a")
    assert grpc.tls is not None
    for tls in (None, stranger, replace(stranger, ca=grpc.tls.ca)):
        with pytest.raises(ShapeshiftError):
            run(ask(Endpoint(grpc.address, tls), replace(CALL, timeout_s=3.0)))


def test_nothing_listens_beyond_the_stated_addresses(ready: Nodes) -> None:
    """The fleet file gives node b another address of this machine: at the usual one nobody answers."""
    node = one(ready, "b")
    for address in (node.grpc.address, node.metrics.removeprefix("https://").removesuffix("/metrics")):
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.2"
        socket.create_connection((host, int(port)), 5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), 5.0)
    record = run_record.read(ready.build / "nodes" / "b" / "run" / "server.json")
    assert record is not None
    for name in ("http", "metrics"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", record.about["ports"][name]), 5.0)


def test_a_node_ends_its_requests_before_it_stops(ready: Nodes) -> None:
    """Open load on node b while it is told to stop: those sent before the stop are answered."""
    endpoint = one(ready, "b").grpc
    failed: list[str] = []
    answered = [0]
    told = threading.Event()

    async def load() -> None:
        client = AsyncClient(endpoint.address, endpoint.tls)

        async def call() -> None:
            try:
                await client.infer(CALL)
                answered[0] += 1
            except ShapeshiftError as error:
                failed.append(str(error))

        running = []
        while not told.is_set():
            running.append(asyncio.create_task(call()))
            await asyncio.sleep(0.01)
        await asyncio.gather(*running)
        await client.close()

    thread = threading.Thread(target=run, args=(load(),))
    thread.start()
    try:
        wait_for(lambda: answered[0] > 20)
        ready.processes["b"].terminate()
        time.sleep(0.5)
    finally:
        told.set()
        thread.join()
    assert ready.processes["b"].wait(timeout=120) == 0
    assert failed == []
    assert ready.log("b").endswith("stopping\nstopped\n")
