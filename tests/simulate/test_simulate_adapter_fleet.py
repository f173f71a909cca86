"""Nodes that share requests, simulated."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bench.fleet import affinity
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import SCHEDULERS
from shapeshift.simulate.adapter_cache import Machine, SimulatedRequest, SimulatedServer, run
from shapeshift.simulate.adapter_fleet import UNREAD_TOKENS, first_s, run_fleet
from shapeshift.simulate.adapter_pool import CacheOptions

MACHINE = Machine(8, 256, 0.02, 0.0, 0.0001, 0.0, 1e6, 2**24, 2**10)
ADAPTERS = {f"x{number}": AdapterInfo(f"x{number}", 8, 2**20) for number in range(12)}
LOOK_S = 0.25
CACHE = CacheOptions(share=0.25)


def requests(count: int, seed: int = 3) -> list[SimulatedRequest]:
    rng = np.random.default_rng(seed)
    instants = np.cumsum(rng.exponential(0.5, count)).tolist()
    return [SimulatedRequest(at, f"x{rng.integers(12)}", 40, 10) for at in instants]


def servers(*names: str) -> dict[str, SimulatedServer]:
    return {name: SimulatedServer(MACHINE, ADAPTERS, SCHEDULERS["arrival"], CACHE, 10) for name in names}


def test_one_node_is_a_server() -> None:
    drawn = requests(60)
    alone = run(MACHINE, ADAPTERS, drawn, SCHEDULERS["arrival"], CACHE)
    results, places = run_fleet(servers("a"), drawn, lambda request, loads, own: own, LOOK_S)
    assert places == {"a": [*range(60)]}
    assert results["a"].loaded_bytes == alone.loaded_bytes
    np.testing.assert_allclose(first_s(results, places), alone.first_s)


def test_a_front_knows_its_own_load_and_what_it_passed_on() -> None:
    drawn = [SimulatedRequest(0.1, "x0", 40, 10) for _ in range(6)]
    seen: list[tuple[str, Mapping[str, float]]] = []

    def to_b(request: SimulatedRequest, loads: Mapping[str, float], own: str) -> str:
        seen.append((own, dict(loads)))
        return "b"

    run_fleet(servers("a", "b"), drawn, to_b, LOOK_S)
    assert [own for own, _ in seen] == ["a", "b"] * 3
    # At a: what it has passed on itself. At b: all that is there.
    assert [loads["b"] for own, loads in seen if own == "a"] == [0, 1, 2]
    assert [loads["b"] for own, loads in seen if own == "b"] == [1, 3, 5]


def test_a_prompt_counts_until_its_first_token() -> None:
    # The first prompt is read in one step, whose end is the look before the last request.
    drawn = [
        SimulatedRequest(0.1, "x0", 40, 10),
        SimulatedRequest(0.1, "x1", 60, 10),
        SimulatedRequest(3.0, "x0", 7, 1),
    ]
    seen: list[Mapping[str, float]] = []

    def to_b(request: SimulatedRequest, work: Mapping[str, float], own: str) -> str:
        seen.append(dict(work))
        return "b"

    run_fleet(servers("a", "b"), drawn, to_b, LOOK_S, UNREAD_TOKENS)
    assert [work["b"] for work in seen] == [0, 40, 0]


def test_affinity_loads_fewer_adapters() -> None:
    regime = affinity.regimes()[2]
    found = {rule: affinity._run(regime, rule, 30.0, 300, 1) for rule in (affinity.ROUND_ROBIN, affinity.AFFINITY)}
    assert found[affinity.AFFINITY][0] < found[affinity.ROUND_ROBIN][0]
