"""Two real Tritons, each with a worker that its own backend `onnxruntime` would serve: a front uses both.

The order matters: each test starts from what the one before it left.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shapeshift.triton.control import ModelControl
from tests import waiting
from tests.polymorph import engine_worker_files
from tests.polymorph.engine_worker_files import TEXTS, check, load, vectors
from tests.polymorph.fleet_nodes import Fleet, running_fleet
from tests.sidecar.project import Command

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.05)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

WORKER = "binned_w00"
FRONTS = {
    "plain": {"engine_threads": "1"},
    "binned": {"placement": "partitioned", "worker_backend": "triton", "workers": "1", "slo_ms": "500"},
}


@pytest.fixture(scope="module")
def fleet(
    make_server: Callable[..., TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
    demo_checkpoint: Path,
    build_fronts: Callable[[Path, Path], Path],
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("engine_fleet")
    _, backends = engine_worker_files.build(folder, demo_checkpoint, FRONTS, build_fronts)
    for node in "ab":
        # Each node has its own copy of what was built.
        shutil.copytree(folder / "build", folder / node, symlinks=True)
    repositories = {node: folder / node / "repository" for node in "ab"}
    with running_fleet(make_server, folder, repositories, (*FRONTS, WORKER), backends) as found:
        yield found


def answers(fleet: Fleet, node: str) -> float:
    """Of the node's worker, since its server started."""
    return fleet.metric(node, "nv_inference_request_success", model=WORKER)


def bins(fleet: Fleet) -> dict[str, str]:
    """By node, the bin of its worker."""
    found = {}
    for node, server in fleet.servers.items():
        with ModelControl(server.grpc_url, server.key) as control:
            found[node] = control.parameters(WORKER)["bin"]
    return found


def test_texts_are_answered_by_the_worker_of_the_other_node(fleet: Fleet) -> None:
    for node in "ab":
        wait_for(lambda: fleet.joined(node, "binned") == 2)  # noqa: B023
        check(fleet.servers[node])
    server = fleet.servers["a"]
    with ModelControl(server.grpc_url, server.key) as control:
        control.unload(WORKER)
        wait_for(lambda: fleet.joined("a", "binned") == 1)
        before = answers(fleet, "b")
        check(server)
        assert answers(fleet, "b") > before
        control.load(WORKER)
    wait_for(lambda: fleet.joined("a", "binned") == 2)


def test_a_killed_server_costs_no_request_and_is_found_again(fleet: Fleet) -> None:
    wait_for(lambda: fleet.joined("a", "binned") == 2)
    wanted = vectors(fleet.servers["a"], "plain", TEXTS)
    killed = fleet.servers["b"]
    for number in range(24):
        if number == 4:
            os.kill(killed.pid, signal.SIGKILL)
        np.testing.assert_allclose(vectors(fleet.servers["a"], "binned", TEXTS), wanted, atol=1e-4)
    wait_for(lambda: fleet.joined("a", "binned") == 1)
    killed.stop()
    fleet.start("b")
    killed.wait_ready()
    wait_for(lambda: fleet.joined("a", "binned") == 2)

    def used() -> bool:
        check(fleet.servers["a"])
        # A front's probes alone are fewer.
        return answers(fleet, "b") > 20

    wait_for(used)


def test_one_plan_places_the_workers_of_both_nodes_and_takes_none_for_dead(fleet: Fleet, tmp_path: Path) -> None:
    for server in fleet.servers.values():
        with ModelControl(server.grpc_url, server.key) as control:
            load(control, WORKER, 16)
    assert bins(fleet) == {"a": "16", "b": "16"}
    options = ("--fleet", str(fleet.file), "--build", str(tmp_path), "--plan-period", "2")
    sidecar = Command(tmp_path / "sidecar.log", "sidecar", *options)
    try:
        sidecar.wait_for("plan binned: keeps the loaded workers")

        def planned() -> bool:
            for server in fleet.servers.values():
                vectors(server, "binned", TEXTS[:2] * 20)
            return "64" in bins(fleet).values()

        wait_for(planned)
        for node in "ab":
            wait_for(lambda: fleet.joined(node, "binned") == 2)  # noqa: B023
            check(fleet.servers[node])
        assert "health" not in sidecar.output
    finally:
        sidecar.end()
