"""The simulated decode loop against times computed by hand, and the effect of the policies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from shapeshift.adapter_cache.policy.length_prediction import Oracle
from shapeshift.adapter_cache.policy.multiqueue import MultiQueue
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import SCHEDULERS
from shapeshift.simulate.adapter_cache import Machine, MakeScheduler, SimulatedRequest, SimulationResult, run
from shapeshift.simulate.adapter_pool import CacheOptions

MACHINE = Machine(
    slots=4,
    prefill_tokens=100,
    base_s=0.01,
    row_s=0.001,
    token_s=0.0001,
    rank_s=0.0,
    load_bytes_s=1000.0,
    pool_bytes=100_000,
    token_bytes=10,
)
ADAPTERS = {f"a{number}": AdapterInfo(f"a{number}", 8, 100) for number in range(10)}
FIFO = SCHEDULERS["fifo"]


def scheduled(scheduler: str) -> MakeScheduler:
    """With queues that are rebuilt often."""
    return partial(MultiQueue, recluster_s=2.0) if scheduler == "chameleon" else SCHEDULERS[scheduler]


def serve(
    requests: list[SimulatedRequest],
    scheduler: MakeScheduler = FIFO,
    caching: CacheOptions | None = None,
    **changed: float,
) -> SimulationResult:
    machine = replace(MACHINE, **changed)  # type: ignore[arg-type]
    return run(machine, ADAPTERS, requests, scheduler, caching or CacheOptions(), Oracle(1.0))


def test_the_time_of_one_request_follows_the_linear_law() -> None:
    got = serve([SimulatedRequest(1.0, None, 250, 3)])
    # Three iterations prefill, and the last of them gives a token; two more give a token each.
    assert got.first_s == pytest.approx([3 * 0.01 + 250 * 0.0001 + 0.001])
    assert got.last_s == pytest.approx(got.first_s + 2 * 0.011)
    assert got.between_s == pytest.approx([0.011, 0.011])
    assert got.loaded_bytes == 0


def test_an_adapter_is_loaded_once_and_then_cached() -> None:
    got = serve([SimulatedRequest(0.0, "a0", 10, 2), SimulatedRequest(5.0, "a0", 10, 2)])
    assert got.first_s == pytest.approx([0.1 + 0.012, 0.012])
    assert (got.loaded_bytes, got.hits, got.misses) == (100, 1, 1)
    twice = [SimulatedRequest(0.0, "a0", 10, 2), SimulatedRequest(5.0, "a0", 10, 2)]
    without = serve(twice, caching=CacheOptions(eviction="unused"))
    assert without.first_s == pytest.approx([0.112, 0.112]) and without.loaded_bytes == 200


def test_loads_run_one_after_the_other_over_the_link() -> None:
    got = serve([SimulatedRequest(0.0, f"a{number}", 1, 1) for number in range(3)])
    assert got.first_s == pytest.approx([0.1, 0.2, 0.3], abs=0.03)


def draw(count: int, seed: int, rate: float = 30.0) -> list[SimulatedRequest]:
    rng = np.random.default_rng(seed)
    instants = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return [
        SimulatedRequest(at, f"a{int(rng.integers(10) ** 2 // 10)}", int(rng.integers(1, 60)), int(rng.integers(1, 30)))
        for at in instants
    ]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("pool_bytes", [100_000, 2_000])
def test_every_request_is_served_under_any_shortage(scheduler: str, pool_bytes: int) -> None:
    given = draw(300, 1)
    got = serve(given, scheduled(scheduler), CacheOptions(prefetch=True), pool_bytes=pool_bytes)
    assert (got.first_s > 0).all() and (got.last_s >= got.first_s).all()
    assert len(got.between_s) == sum(request.answer_tokens - 1 for request in given)
    assert got.hits + got.misses == len(given)


@pytest.mark.parametrize("scheduler", ["arrival", "chameleon", "sjf", "wrs"])
@pytest.mark.parametrize("seed", range(3))
def test_no_wait_is_three_times_the_longest_one_in_arrival_order(scheduler: str, seed: int) -> None:
    given = draw(600, seed, rate=60.0)
    first = serve(given, pool_bytes=8_000).first_s.max()
    assert serve(given, scheduled(scheduler), pool_bytes=8_000).first_s.max() <= 3 * first


def test_a_cache_saves_loads_most_of_all_with_gdsf() -> None:
    """Adapters of two sizes, the small ones requested more often: the score keeps adapters that cost more to load."""
    known = {f"s{at}": AdapterInfo(f"s{at}", 8, 100) for at in range(20)}
    known |= {f"L{at}": AdapterInfo(f"L{at}", 64, 800) for at in range(20)}
    rng = np.random.default_rng(0)
    given = [
        SimulatedRequest(at * 0.05, f"{'s' if rng.random() < 0.7 else 'L'}{int(rng.integers(20))}", 5, 2)
        for at in range(1500)
    ]
    machine = replace(MACHINE, pool_bytes=20_000, load_bytes_s=1e6)

    def loaded(caching: CacheOptions) -> int:
        return run(machine, known, given, FIFO, replace(caching, share=0.35)).loaded_bytes

    none = loaded(CacheOptions(eviction="unused"))
    by_policy = {name: loaded(CacheOptions(eviction=name)) for name in ("gdsf", "lru", "score")}
    assert by_policy["gdsf"] < by_policy["lru"] < by_policy["score"] < none


def test_a_reserve_is_for_adapters_alone_and_what_texts_leave_holds_further_ones() -> None:
    twice = [SimulatedRequest(float(number), f"a{number % 10}", 10, 2) for number in range(20)]
    got = serve(twice, caching=CacheOptions(reserve_bytes=200), pool_bytes=2_000)
    assert (got.hits, got.misses, got.loaded_bytes) == (10, 10, 1000)
    got = serve(twice, caching=CacheOptions(loaded=[f"a{number}" for number in range(7)]), pool_bytes=2_000)
    assert (got.hits, got.misses, got.loaded_bytes) == (17, 3, 300)
    texts = [SimulatedRequest(0.0, None, 20, 20)] * 2
    together, apart = (serve(texts, caching=CacheOptions(reserve_bytes=kept), pool_bytes=1000) for kept in (200, 201))
    assert together.last_s[1] == together.last_s[0] < apart.last_s[1] / 1.5


def test_loads_ahead_give_way_to_the_request_that_runs() -> None:
    # Its text takes 600 of the pool's bytes; the adapters of those behind it would take all.
    requests = [
        SimulatedRequest(0.0, None if number == 0 else f"a{number}", 10, 50 if not number else 2)
        for number in range(10)
    ]
    for eviction in ("unused", "gdsf"):
        got = serve(requests, caching=CacheOptions(eviction), pool_bytes=1000)
        assert np.isfinite(got.last_s).all() and (got.last_s > 0).all()
        assert got.misses == 9 and got.loaded_bytes >= 900
