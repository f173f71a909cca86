"""Routers and workers in a real Triton, over engines that only imitate: what happens to workers shows to no client."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from shapeshift import installation
from shapeshift.polymorph.router.transport import WorkerInfo
from shapeshift.triton import metrics
from shapeshift.triton.control import ModelControl
from tests import waiting

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.05)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

LATENCY_MS = (2, 6)
FRONTS: dict[str, dict[str, object]] = {
    "plain": {"engine_threads": 2},
    "shared": {"placement": "resident", "workers": 2},
    "binned": {"placement": "partitioned", "workers": 2, "slo_ms": 100},
}
WORKERS = [f"{front}_w0{number}" for front in ("shared", "binned") for number in range(2)]
TEXTS = [[[1 + own * 31 % 30000] * (1 + own * 11 % 150)] * (1 + own % 3) for own in range(24)]


@pytest.fixture(scope="module")
def server(
    make_server: Callable[..., TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
    add_front: Callable[..., Path],
    build_fronts: Callable[[Path, Path], Path],
) -> Iterator[TritonServer]:
    """A Triton with the three fronts and all workers."""
    folder = tmp_path_factory.mktemp("router")
    for name, parameters in FRONTS.items():
        add_front(folder / "model_repository", name, LATENCY_MS, bins="16,64", **parameters)
    generated = build_fronts(folder / "model_repository", folder / "build")
    with make_server((generated,), (*FRONTS, *WORKERS), folder / "run") as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def control(server: TritonServer) -> Iterator[ModelControl]:
    with ModelControl(server.grpc_url, server.key) as connection:
        yield connection


def infer(client: Any, model: str, rows: Sequence[Sequence[int]]) -> np.ndarray:
    shape = (len(rows), len(rows[0]))
    arrays = {"INPUT_IDS": np.array(rows, dtype=np.int64), "ATTENTION_MASK": np.ones(shape, np.int64)}
    inputs = [grpc_client.InferInput(name, shape, "INT64") for name in arrays]
    for tensor, values in zip(inputs, arrays.values(), strict=True):
        tensor.set_data_from_numpy(values)
    return np.array(client.infer(model, inputs, client_timeout=60).as_numpy("EMBEDDING"))


@pytest.fixture(scope="module")
def vectors(server: TritonServer) -> list[np.ndarray]:
    """What the front that holds its engines itself gives for TEXTS."""
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        return [infer(client, "plain", rows) for rows in TEXTS]


def state(server: TritonServer, worker: str) -> WorkerInfo:
    """What the worker says of itself."""
    inputs = [grpc_client.InferInput("INPUT_IDS", [1], "INT64"), grpc_client.InferInput("LENGTHS", [1], "INT32")]
    inputs[0].set_data_from_numpy(np.array([101], np.int64))
    inputs[1].set_data_from_numpy(np.array([1], np.int32))
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        return WorkerInfo(*client.infer(worker, inputs, client_timeout=60).as_numpy("STATE").tolist())


def load(control: ModelControl, model: str, **parameters: int) -> None:
    """Load the model with other parameters, as a scheduler does."""
    config = control.config(model)
    for name, value in parameters.items():
        config["parameters"][name] = {"string_value": str(value)}
    control.load(model, config)


def gauge(server: TritonServer, name: str, **labels: str) -> dict[str, float]:
    """The values of a gauge by process."""
    samples = metrics.scrape(server.metrics_url)
    wanted = set(labels.items())
    return {dict(own)["pid"]: value for (series, own), value in samples.items() if series == name and wanted <= own}


def joined(server: TritonServer, front: str) -> list[float]:
    return list(gauge(server, "shapeshift_workers_joined", model=front).values())


class Traffic:
    """Requests for all of TEXTS from a few threads, all the while; what went wrong."""

    def __init__(self, server: TritonServer, front: str, vectors: list[np.ndarray]) -> None:
        self.served = 0
        self.wrong: list[Any] = []
        self._server, self._front, self._vectors = server, front, vectors
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(3)]

    def wait(self, more: int = 40) -> None:
        """Wait until so many further requests were served."""
        wanted = self.served + more
        wait_for(lambda: self.served >= wanted or bool(self.wrong))
        assert self.wrong == []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.wrong == []

    def _work(self, number: int) -> None:
        with grpc_client.InferenceServerClient(self._server.grpc_url) as client:
            while not self._stop.is_set():
                number = (number + 7) % len(TEXTS)
                try:
                    np.testing.assert_array_equal(infer(client, self._front, TEXTS[number]), self._vectors[number])
                    self.served += 1
                except Exception as error:  # noqa: BLE001  the test must see it
                    self.wrong.append(error)
                    return


@pytest.mark.parametrize("front", ["shared", "binned"])
def test_a_router_answers_as_a_front_that_holds_the_engines(
    server: TritonServer, vectors: list[np.ndarray], front: str
) -> None:
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        for rows, wanted in zip(TEXTS, vectors, strict=True):
            np.testing.assert_array_equal(infer(client, front, rows), wanted)
    wait_for(lambda: joined(server, front) == [2])


@pytest.mark.kills
@pytest.mark.parametrize(
    ("worker", "number"),
    [("shared_w00", signal.SIGKILL), pytest.param("binned_w01", signal.SIGSTOP, marks=pytest.mark.long)],
)
def test_a_worker_that_dies_or_stops_under_load_costs_no_request(
    server: TritonServer, control: ModelControl, vectors: list[np.ndarray], worker: str, number: signal.Signals
) -> None:
    front = worker.partition("_")[0]
    wait_for(lambda: joined(server, front) == [2])
    before = state(server, worker)
    with Traffic(server, front, vectors) as traffic:
        os.kill(before.pid, number)
        try:
            wait_for(lambda: joined(server, front) == [1])
            # By this the scheduler knows that it is dead.
            timeouts = {"model": front, "worker": worker}
            wait_for(lambda: next(iter(gauge(server, "shapeshift_worker_timeouts", **timeouts).values())) >= 2)
            traffic.wait()
            load(control, worker, generation=before.generation + 1)
            wait_for(lambda: joined(server, front) == [2])
            traffic.wait()
        finally:
            if number == signal.SIGSTOP:
                os.kill(before.pid, signal.SIGKILL)
        traffic.wait()
    after = state(server, worker)
    assert (after.bin, after.generation) == (before.bin, before.generation + 1) and after.pid != before.pid
    wait_for(lambda: list(gauge(server, "shapeshift_worker_timeouts", model=front, worker=worker).values()) == [0])


def test_bins_change_under_load_and_no_request_fails(
    server: TritonServer, control: ModelControl, vectors: list[np.ndarray]
) -> None:
    wait_for(lambda: joined(server, "binned") == [2])
    with Traffic(server, "binned", vectors) as traffic:
        for edge in (16, 512):
            load(control, "binned_w00", bin=edge)
            traffic.wait()
            assert state(server, "binned_w00").bin == edge
    wait_for(lambda: joined(server, "binned") == [2])


def test_a_worker_that_leaves_and_joins_under_load_costs_no_request(
    server: TritonServer, control: ModelControl, vectors: list[np.ndarray]
) -> None:
    wait_for(lambda: joined(server, "shared") == [2])
    with Traffic(server, "shared", vectors) as traffic:
        control.unload("shared_w01")
        wait_for(lambda: joined(server, "shared") == [1])
        traffic.wait()
        control.load("shared_w01")
        wait_for(lambda: joined(server, "shared") == [2])
        traffic.wait()


def test_a_front_is_reloaded_under_load(server: TritonServer, control: ModelControl, vectors: list[np.ndarray]) -> None:
    pids = set(gauge(server, "shapeshift_workers_joined", model="shared"))
    with Traffic(server, "shared", vectors) as traffic:
        load(control, "shared", generation=1)
        wait_for(
            lambda: (
                2
                in [
                    value
                    for pid, value in gauge(server, "shapeshift_workers_joined", model="shared").items()
                    if pid not in pids
                ]
            )
        )
        traffic.wait()
    server.require_running()
    assert "could not be sent" not in server.settings.log.read_text()


# The server stands still while its model's process says that it has initialised, and for some probes longer.
PAUSING_BACKEND = """
import importlib.util, os, signal, subprocess
spec = importlib.util.spec_from_file_location("backend", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

class TritonPythonModel(module.TritonPythonModel):
    def initialize(self, args):
        super().initialize(args)
        if args["model_name"] == "shared":
            # Not by a thread: this process may wait for the server with Python's lock held.
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {{os.getppid()}}"])
            os.kill(os.getppid(), signal.SIGSTOP)
"""


def test_no_worker_is_called_before_the_server_knows_that_the_front_has_initialised(
    make_server: Callable[..., TritonServer],
    tmp_path: Path,
    add_front: Callable[..., Path],
    build_fronts: Callable[[Path, Path], Path],
) -> None:
    backend = tmp_path / "backends" / "polymorph"
    backend.mkdir(parents=True)
    (backend / "model.py").write_text(
        PAUSING_BACKEND.format(file=str(installation.BACKENDS / "polymorph" / "model.py"))
    )
    add_front(tmp_path / "model_repository", "shared", LATENCY_MS, bins="16,64", placement="resident", workers=1)
    generated = build_fronts(tmp_path / "model_repository", tmp_path / "build")
    models = ("shared", "shared_w00")
    with make_server((generated,), models, tmp_path / "run", tmp_path / "backends") as started:
        with grpc_client.InferenceServerClient(started.wait_ready().grpc_url) as client:
            infer(client, "shared", TEXTS[0])
        wait_for(lambda: joined(started, "shared") == [1])
