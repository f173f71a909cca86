"""Workers that Triton's own backend `onnxruntime` would serve, in a real Triton; the wheel lacks it, a double computes.

What is real: the generated configurations and files, how Triton reads them, its versions, the router, model control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shapeshift.triton.control import ModelControl
from tests import waiting
from tests.gauges import total
from tests.polymorph import engine_worker_files
from tests.polymorph.engine_worker_files import check, load

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.05)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

FRONTS = {
    "plain": {"engine_threads": "1"},
    "binned": {"placement": "partitioned", "worker_backend": "triton", "workers": "2", "slo_ms": "500"},
}
WORKERS = ["binned_w00", "binned_w01"]


@pytest.fixture(scope="module")
def server(
    make_server: Callable[..., TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
    demo_checkpoint: Path,
    build_fronts: Callable[[Path, Path], Path],
) -> Iterator[TritonServer]:
    """A Triton with a front that computes itself, one with two workers, and these."""
    folder = tmp_path_factory.mktemp("engine_workers")
    generated, backends = engine_worker_files.build(folder, demo_checkpoint, FRONTS, build_fronts)
    with make_server((generated,), (*FRONTS, *WORKERS), folder / "run", backends) as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def control(server: TritonServer) -> Iterator[ModelControl]:
    with ModelControl(server.grpc_url, server.key) as connection:
        yield connection


def joined(server: TritonServer) -> float:
    return total(server, "workers_joined", model="binned")


def bin_of(version: str) -> int:
    return int(version) % 10**6


def ready_bins(control: ModelControl) -> list[int]:
    """Of the first worker."""
    return [bin_of(one.version) for one in control.index() if one.name == WORKERS[0] and one.state == "READY"]


def test_workers_of_tritons_own_backend_serve_every_length(server: TritonServer, control: ModelControl) -> None:
    wait_for(lambda: joined(server) == 2)
    check(server)
    config: dict[str, Any] = control.config("binned_w00")
    assert config["backend"] == "onnxruntime"
    assert [bin_of(version) for version in config["version_policy"]["specific"]["versions"]] == [64]
    assert ready_bins(control) == [64], "Triton loads the bin alone"


def test_a_worker_gets_another_bin_while_requests_come(server: TritonServer, control: ModelControl) -> None:
    wait_for(lambda: joined(server) == 2)
    for bin_edge in (16, 32, 16):
        load(control, "binned_w00", bin_edge)
        check(server)
        wait_for(lambda: joined(server) == 2)
        check(server)
        assert ready_bins(control) == [bin_edge]


def test_without_a_worker_texts_wait_for_one(server: TritonServer, control: ModelControl) -> None:
    for worker in WORKERS:
        control.unload(worker)
        control.wait_unloaded(worker)
    wait_for(lambda: joined(server) == 0)
    for worker in WORKERS:
        control.load(worker)
    wait_for(lambda: joined(server) == 2)
    check(server)
