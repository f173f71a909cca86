"""Nodes that share requests, simulated."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bench.fleet import affinity
from bench.fleet.affinity import AFFINITY, ROUND_ROBIN, serve
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import SCHEDULERS
from shapeshift.simulate.adapter_cache import Machine, SimulatedRequest, SimulatedServer, run
from shapeshift.simulate.adapter_pool import CacheOptions

MACHINE = Machine(8, 256, 0.02, 0.0, 0.0001, 0.0, 1e6, 2**24, 2**10)
ADAPTERS = {f"x{number}": AdapterInfo(f"x{number}", 8, 2**20) for number in range(12)}
LOOK_S = 0.25
CACHE = CacheOptions(share=0.25)


def servers(*names: str) -> dict[str, SimulatedServer]:
    return {name: SimulatedServer(MACHINE, ADAPTERS, SCHEDULERS["arrival"], CACHE, 10) for name in names}


def seen_when_all_go_to_b(requests: list[SimulatedRequest]) -> list[float]:
    """The work at node b that the fronts of a and b, in turn, know of."""
    seen: list[float] = []

    def to_b(request: SimulatedRequest, unread: Mapping[str, float]) -> str:
        seen.append(unread["b"])
        return "b"

    serve(servers("a", "b"), requests, to_b, LOOK_S)
    return seen


def test_one_node_is_a_server() -> None:
    rng = np.random.default_rng(3)
    instants = np.cumsum(rng.exponential(0.5, 60)).tolist()
    requests = [SimulatedRequest(at, f"x{rng.integers(12)}", 40, 10) for at in instants]
    alone = run(MACHINE, ADAPTERS, requests, SCHEDULERS["arrival"], CACHE)
    loaded, first_s = serve(servers("a"), requests, lambda request, unread: "a", LOOK_S)
    assert loaded == alone.loaded_bytes
    np.testing.assert_allclose(first_s, alone.first_s)


def test_a_front_knows_its_own_work_and_what_it_passed_on() -> None:
    seen = seen_when_all_go_to_b([SimulatedRequest(0.1, "x0", 40, 10) for _ in range(6)])
    # At a: what it has passed on itself. At b: all that is there.
    assert seen[0::2] == [0, 40, 80] and seen[1::2] == [40, 120, 200]


def test_a_prompt_counts_until_its_first_token() -> None:
    # The first prompt is read in one step, whose end is the look before the last request.
    requests = [(0.1, "x0", 40, 10), (0.1, "x1", 60, 10), (3.0, "x0", 7, 1)]
    assert seen_when_all_go_to_b([SimulatedRequest(*one) for one in requests]) == [0, 40, 0]


def test_affinity_loads_fewer_adapters() -> None:
    regime = affinity.regimes()[2]
    (plain, _), (ours, _) = (affinity.run(regime, rule, 30.0, 300, 1) for rule in (ROUND_ROBIN, AFFINITY))
    assert ours < plain
