"""Real Tritons that are the nodes of one fleet on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from shapeshift.serving.model_args import FLEET_FILE_VARIABLE, NODE_VARIABLE
from shapeshift.triton import metrics
from tests.fleet import fleet_files

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer


@dataclass
class Fleet:
    """The file of the fleet, and the server of each node."""

    file: Path
    servers: dict[str, TritonServer]

    def start(self, node: str) -> None:
        """Start the server of a node of the fleet."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(FLEET_FILE_VARIABLE, str(self.file))
            patched.setenv(NODE_VARIABLE, node)
            self.servers[node].start()

    def state(self, *names: str) -> None:
        """Let these be the nodes of the fleet."""
        keys = {name: self.servers[name].settings.run_directory / "key" for name in names}
        fleet_files.write_servers(self.file, {name: self.servers[name] for name in names}, keys)

    def metric(self, node: str, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        samples = metrics.scrape(self.servers[node].metrics_url)
        return sum(value for (series, own), value in samples.items() if series == name and wanted <= own)

    def joined(self, node: str, front: str) -> float:
        return self.metric(node, "shapeshift_workers_joined", model=front)

    def computed(self, node: str, worker: str) -> float:
        return self.metric(node, "shapeshift_engine_rows_total", model=worker)


@contextmanager
def running_fleet(
    make_server: Callable[..., TritonServer],
    folder: Path,
    repositories: Mapping[str, Path],
    models: Sequence[str],
    *backends: Path,
) -> Iterator[Fleet]:
    """A server with the models of its repository for each node, all ready. folder: for the fleet file and logs.

    backends: the folder of backends, by default this project's.
    """
    found = Fleet(folder / "fleet.toml", {})
    try:
        for node, repository in repositories.items():
            found.servers[node] = make_server((repository,), models, folder / node / "run", *backends)
        found.state(*repositories)
        for node in repositories:
            found.start(node)
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
