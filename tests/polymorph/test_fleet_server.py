"""Two real Tritons, each a node of one fleet: a front of either reaches the workers of both."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from shapeshift.fleet.environment import FLEET_FILE_VARIABLE, NODE_VARIABLE
from shapeshift.triton import metrics
from shapeshift.triton.control import ModelControl
from tests import waiting

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, timeout_s=60, pause_s=0.05)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

NODES = ("a", "b")
FRONTS: dict[str, dict[str, object]] = {
    "shared": {"placement": "resident", "workers": 1},
    "binned": {"placement": "partitioned", "workers": 1, "slo_ms": 100},
}
TEXTS = [[[1 + own * 31 % 30000] * (1 + own * 11 % 150)] * (1 + own % 3) for own in range(24)]


@dataclass
class Fleet:
    """The file of the fleet, and the server of each node."""

    file: Path
    servers: dict[str, TritonServer]

    def state(self, *names: str) -> None:
        """Let these be the nodes of the fleet."""
        lines = ['name = "test"']
        for name in names:
            server = self.servers[name]
            lines += ["[[nodes]]", f'name = "{name}"', f'grpc = "{server.grpc_url}"']
            lines += [f'metrics = "{server.metrics_url}"']
        written = self.file.with_suffix(".new")
        written.write_text("\n".join(lines))
        written.replace(self.file)

    def metric(self, node: str, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        samples = metrics.scrape(self.servers[node].metrics_url)
        return sum(value for (series, own), value in samples.items() if series == name and wanted <= own)

    def joined(self, node: str, front: str) -> float:
        return self.metric(node, "shapeshift_workers_joined", model=front)

    def computed(self, node: str, worker: str) -> float:
        return self.metric(node, "shapeshift_engine_rows_total", model=worker)


@pytest.fixture(scope="module")
def fleet(
    make_server: Callable[..., TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
    add_front: Callable[..., Path],
    build_fronts: Callable[[Path, Path], Path],
) -> Iterator[Fleet]:
    """Nodes with the same fronts, each with one worker of its own."""
    folder = tmp_path_factory.mktemp("fleet")
    for name, parameters in FRONTS.items():
        add_front(folder / "model_repository", name, (2, 6), bins="16,64", **parameters)
    build_fronts(folder / "model_repository", folder / "build")
    models = (*FRONTS, *(f"{front}_w00" for front in FRONTS))
    found = Fleet(folder / "fleet.toml", {})
    try:
        for node in NODES:
            # Each node has its own copy of what was built.
            shutil.copytree(folder / "build", folder / node)
            found.servers[node] = make_server((folder / node / "repository",), models, folder / node / "run")
        found.state(*NODES)
        for node, server in found.servers.items():
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv(FLEET_FILE_VARIABLE, str(found.file))
                patched.setenv(NODE_VARIABLE, node)
                server.start()
        for server in found.servers.values():
            server.wait_ready()
        yield found
    finally:
        for server in found.servers.values():
            server.stop()


def infer(server: TritonServer, model: str, rows: Sequence[Sequence[int]]) -> np.ndarray:
    shape = (len(rows), len(rows[0]))
    arrays = {"INPUT_IDS": np.array(rows, dtype=np.int64), "ATTENTION_MASK": np.ones(shape, np.int64)}
    inputs = [grpc_client.InferInput(name, shape, "INT64") for name in arrays]
    for tensor, values in zip(inputs, arrays.values(), strict=True):
        tensor.set_data_from_numpy(values)
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        return np.array(client.infer(model, inputs, client_timeout=60).as_numpy("EMBEDDING"))


@pytest.mark.parametrize("front", FRONTS)
def test_fronts_of_both_nodes_use_the_workers_of_both_and_answer_alike(fleet: Fleet, front: str) -> None:
    for node in NODES:
        wait_for(lambda: fleet.joined(node, front) == 2)  # noqa: B023
    worker = f"{front}_w00"
    before = {node: fleet.computed(node, worker) for node in NODES}
    for rows in TEXTS:
        ours, theirs = (infer(fleet.servers[node], front, rows) for node in NODES)
        np.testing.assert_array_equal(ours, theirs)
    for node in NODES:
        wait_for(lambda: fleet.computed(node, worker) > before[node])  # noqa: B023


def test_a_node_leaves_and_joins_by_the_file(fleet: Fleet) -> None:
    wait_for(lambda: fleet.joined("a", "shared") == 2)
    fleet.state("a")
    wait_for(lambda: fleet.joined("a", "shared") == 1)
    assert infer(fleet.servers["a"], "shared", TEXTS[3]).shape == (len(TEXTS[3]), 8)
    fleet.state(*NODES)
    wait_for(lambda: fleet.joined("a", "shared") == 2)


def test_a_front_serves_by_the_other_node_while_its_own_worker_is_gone(fleet: Fleet) -> None:
    server = fleet.servers["a"]
    wait_for(lambda: fleet.joined("a", "shared") == 2)
    wanted = [infer(fleet.servers["b"], "shared", rows) for rows in TEXTS]
    with ModelControl(server.grpc_url, server.key) as control:
        control.unload("shared_w00")
        wait_for(lambda: fleet.joined("a", "shared") == 1)
        for rows, vectors in zip(TEXTS, wanted, strict=True):
            np.testing.assert_array_equal(infer(server, "shared", rows), vectors)
        control.load("shared_w00")
    wait_for(lambda: fleet.joined("a", "shared") == 2)


def test_a_node_that_is_killed_costs_no_request_of_another(fleet: Fleet) -> None:
    wait_for(lambda: fleet.joined("a", "shared") == 2)
    wanted = [infer(fleet.servers["a"], "shared", rows) for rows in TEXTS]
    killed = fleet.servers["b"]
    for number, (rows, vectors) in enumerate(zip(TEXTS, wanted, strict=True)):
        if number == 4:
            os.kill(killed.pid, signal.SIGKILL)
        np.testing.assert_array_equal(infer(fleet.servers["a"], "shared", rows), vectors)
    wait_for(lambda: fleet.joined("a", "shared") == 1)
