"""Workers that Triton's own backend `onnxruntime` would serve, in a real Triton; the wheel lacks it, a double computes.

What is real: the generated configurations and files, how Triton reads them, its versions, the router, model control.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from shapeshift.polymorph import engine_model
from shapeshift.triton import metrics
from shapeshift.triton.control import ModelControl
from tests import waiting

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, timeout_s=60, pause_s=0.05)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

PROJECT = Path(__file__).resolve().parents[2]
DOUBLE = Path(__file__).parent / "backends" / "onnxruntime"
CONFIG = """
backend: "polymorph"
output [ { name: "EMBEDDING" } ]
instance_group [ { kind: KIND_CPU } ]
"""
COMMON = {"provider": "onnxruntime", "precision": "f32", "layers": "1", "max_tokens": "64", "bins": "16,32"}
FRONTS = {
    "plain": {"engine_threads": "1"},
    "binned": {"placement": "partitioned", "worker_backend": "triton", "workers": "2", "slo_ms": "500"},
}
WORKERS = ["binned_w00", "binned_w01"]
TEXTS = ["word " * words for words in (1, 5, 11, 20, 28, 40, 58)]


@pytest.fixture(scope="module")
def server(
    make_server: Callable[..., TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
    demo_checkpoint: Path,
    build_fronts: Callable[[Path, Path], Path],
) -> Iterator[TritonServer]:
    """A Triton with a front that computes itself, one with two workers, and these."""
    folder = tmp_path_factory.mktemp("engine_workers")
    for name, own in FRONTS.items():
        stated = {"checkpoint": demo_checkpoint, **COMMON, **own}
        (folder / "repository" / name).mkdir(parents=True)
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in stated.items()]
        (folder / "repository" / name / "config.pbtxt").write_text(CONFIG + "\n".join(lines))
    generated = build_fronts(folder / "repository", folder / "build")
    shutil.copytree(PROJECT / "backends" / "polymorph", folder / "backends" / "polymorph")
    shutil.copytree(DOUBLE, folder / "backends" / "onnxruntime")
    with make_server((generated,), (*FRONTS, *WORKERS), folder / "run", folder / "backends") as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def control(server: TritonServer) -> Iterator[ModelControl]:
    with ModelControl(server.grpc_url, server.key) as connection:
        yield connection


def vectors(server: TritonServer, model: str, texts: list[str]) -> np.ndarray:
    tensor = grpc_client.InferInput("TEXT", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], object))
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        return np.array(client.infer(model, [tensor], client_timeout=60).as_numpy("EMBEDDING"))


def joined(server: TritonServer) -> float:
    found = metrics.scrape(server.metrics_url)
    return sum(
        value
        for (name, labels), value in found.items()
        if name == "shapeshift_workers_joined" and ("model", "binned") in labels
    )


def load(control: ModelControl, worker: str, bin_edge: int) -> None:
    """Give the worker another bin, as the sidecar does."""
    config = control.config(worker)
    config["parameters"]["bin"] = {"string_value": str(bin_edge)}
    engine_model.place(config, bin_edge)
    control.load(worker, config)


def check(server: TritonServer) -> None:
    """Requests of every length get the vectors that the engines give inside a front."""
    for texts in ([TEXTS[0]], [TEXTS[3]], [TEXTS[6]], TEXTS):
        wanted, found = (vectors(server, model, texts) for model in ("plain", "binned"))
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_workers_of_tritons_own_backend_serve_every_length(server: TritonServer, control: ModelControl) -> None:
    wait_for(lambda: joined(server) == 2)
    check(server)
    config: dict[str, Any] = control.config("binned_w00")
    assert config["backend"] == "onnxruntime" and [
        int(n) for n in config["version_policy"]["specific"]["versions"]
    ] == [64]
    versions = {state.version for state in control.index() if state.name == "binned_w00" and state.state == "READY"}
    assert versions == {"64"}, "Triton loads the bin alone"


def test_a_worker_gets_another_bin_while_requests_come(server: TritonServer, control: ModelControl) -> None:
    wait_for(lambda: joined(server) == 2)
    for bin_edge in (16, 32, 16):
        load(control, "binned_w00", bin_edge)
        check(server)
        wait_for(lambda: joined(server) == 2)
        check(server)
        ready = {state.version for state in control.index() if state.name == "binned_w00" and state.state == "READY"}
        assert ready == {str(bin_edge)}


def test_without_a_worker_texts_wait_for_one(server: TritonServer, control: ModelControl) -> None:
    for worker in WORKERS:
        control.unload(worker)
        control.wait_unloaded(worker)
    wait_for(lambda: joined(server) == 0)
    for worker in WORKERS:
        control.load(worker)
    wait_for(lambda: joined(server) == 2)
    check(server)
