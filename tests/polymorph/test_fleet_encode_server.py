"""The real engines of `encode` on two nodes: it does not show which node has computed a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench.common.front_variants import ENGINES, publish_variant
from shapeshift.engines import manifest
from shapeshift.triton.control import ModelControl
from tests import waiting
from tests.polymorph.fleet_nodes import Fleet, infer, running_fleet

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

wait_for = partial(waiting.wait_for, pause_s=0.1)

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(600)]

FRONT, WORKER = "in_fleet", "in_fleet_w00"


@pytest.fixture(scope="module")
def fleet(make_server: Callable[..., TritonServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes with a worker each, which hold all engines."""
    if not ENGINES.is_dir():
        pytest.skip(f"no engines in {ENGINES}: run `make engines`")
    folder = tmp_path_factory.mktemp("encode_fleet")
    built = manifest.load(ENGINES)
    one = {"placement": "resident", "workers": "1", "min_workers": "1", "max_workers": "1"}
    publish_variant(FRONT, built.engines, folder / "repository", packs_rows=True, parameters=one)
    repositories = dict.fromkeys("ab", folder / "repository")
    with running_fleet(make_server, folder, repositories, (FRONT, WORKER)) as found:
        engines = len(built.engines)
        for node in "ab":
            wait_for(lambda: found.metric(node, "shapeshift_engines_loaded", model=WORKER) == engines)  # noqa: B023
        yield found


def test_each_node_alone_and_both_together_give_the_same_answers(fleet: Fleet) -> None:
    rng = random.Random(1)
    texts = [[[rng.randint(1000, 30000) for _ in range(rng.choice((3, 16, 40, 100, 300, 512)))]] for _ in range(30)]
    server = fleet.servers["a"]
    wait_for(lambda: fleet.joined("a", FRONT) == 2)
    together = [infer(server, FRONT, rows) for rows in texts]
    fleet.state("a")
    wait_for(lambda: fleet.joined("a", FRONT) == 1)
    alone = [infer(server, FRONT, rows) for rows in texts]
    fleet.state("a", "b")
    wait_for(lambda: fleet.joined("a", FRONT) == 2)
    with ModelControl(server.grpc_url, server.key) as control:
        control.unload(WORKER)
        wait_for(lambda: fleet.joined("a", FRONT) == 1)
        there = [infer(server, FRONT, rows) for rows in texts]
    for ours, theirs, mixed in zip(alone, there, together, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ours, mixed)
