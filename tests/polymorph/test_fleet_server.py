"""Two real Tritons, each a node of one fleet: a front of either reaches the workers of both."""

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
from tests.polymorph.fleet_nodes import Fleet, infer, running_fleet

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.05)

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

NODES = ("a", "b")
FRONTS: dict[str, dict[str, object]] = {
    "shared": {"placement": "resident", "workers": 1},
    "binned": {"placement": "partitioned", "workers": 1, "slo_ms": 100},
}
TEXTS = [[[1 + own * 31 % 30000] * (1 + own * 11 % 150)] * (1 + own % 3) for own in range(24)]

# More than the nearest worker takes at once.
MANY = [[7] * 100] * 64


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
    for node in NODES:
        # Each node has its own copy of what was built.
        shutil.copytree(folder / "build", folder / node)
    models = (*FRONTS, *(f"{front}_w00" for front in FRONTS))
    with running_fleet(make_server, folder, {node: folder / node / "repository" for node in NODES}, models) as found:
        yield found


@pytest.mark.parametrize("front", FRONTS)
def test_fronts_of_both_nodes_use_the_workers_of_both_and_answer_alike(fleet: Fleet, front: str) -> None:
    for node in NODES:
        wait_for(lambda: fleet.joined(node, front) == 2)  # noqa: B023
    for rows in TEXTS:
        ours, theirs = (infer(fleet.servers[node], front, rows) for node in NODES)
        np.testing.assert_array_equal(ours, theirs)
    for node, other in zip(NODES, reversed(NODES), strict=True):
        before = fleet.computed(other, f"{front}_w00")

        def shared(node: str = node, other: str = other, before: float = before) -> bool:
            infer(fleet.servers[node], front, MANY)
            return fleet.computed(other, f"{front}_w00") > before

        wait_for(shared)


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
