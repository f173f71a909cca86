"""Adapter affinity against round robin, chance and least work, over three nodes: simulated, with the server's policies.

Chance shows what uneven arrivals cost: round robin deals requests more evenly than they come, affinity does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

import numpy as np

from bench.adapter_cache.loads import draw
from bench.adapter_cache.report import DEFAULT, WARM
from bench.adapter_cache.simulated import ACCURACY, PARTS, Regime, regimes
from bench.common.output import Output, progress
from shapeshift.adapter_cache.policy.length_prediction import Oracle
from shapeshift.fleet.policy.placement import LOOK_S, least_unread, least_work
from shapeshift.simulate.adapter_cache import SimulatedServer
from shapeshift.simulate.adapter_fleet import REQUESTS, UNREAD_TOKENS, Choose, Work, first_s, run_fleet

NODES = ("a", "b", "c")
AFFINITY, ROUND_ROBIN, LEAST_WORK, CHANCE = "affinity", "round robin", "least work", "chance"
# Of the capacity of one node without a cache, times the number of nodes.
_LOAD = 0.7


def measure(output: Output, quick: bool) -> None:
    """Bytes loaded and the 99th percentile of the first token, by regime and rule; medians over seeds."""
    requests, seeds = (1500, (1,)) if quick else (6000, (1, 2, 3))
    output.say(f"\nadapters on {len(NODES)} nodes, SIMULATED: 100 adapters, {requests} requests, load {_LOAD:.0%}")
    for regime in regimes():
        rate = regime.capacity(requests // 3) * _LOAD * len(NODES)
        found = {}
        for rule in _RULES:
            progress(f"{regime.name}, {rule}")
            found[rule] = np.median([_run(regime, rule, rate, requests, seed) for seed in seeds], axis=0)
        output.say(f"  {regime.name} ({rate:.1f} requests/s)")
        for rule, (loaded, p50, p99) in found.items():
            ratio = loaded / found[ROUND_ROBIN][0], p99 / found[ROUND_ROBIN][2]
            output.say(
                f"    {rule:12} {loaded / 2**30:8.1f} GiB loaded, first token p50 {p50 * 1e3:6.0f} ms, p99 "
                f"{p99 * 1e3:6.0f} ms; of round robin's: bytes {ratio[0]:.2f}, p99 {ratio[1]:.2f}"
            )
        output.data.setdefault("affinity", {})[regime.name] = {rule: one.tolist() for rule, one in found.items()}


def _round_robin() -> Choose:
    turns = count()
    return lambda request, work, own: NODES[next(turns) % len(NODES)]


def _chance() -> Choose:
    source = np.random.default_rng(0)
    return lambda request, work, own: NODES[source.integers(len(NODES))]


# The rule, and what fronts count for it.
_RULES: Mapping[str, tuple[Callable[[], Choose], Work]] = {
    ROUND_ROBIN: (_round_robin, REQUESTS),
    CHANCE: (_chance, REQUESTS),
    LEAST_WORK: (lambda: lambda request, work, own: least_work(work, own), REQUESTS),
    AFFINITY: (lambda: lambda request, work, own: least_unread(str(request.adapter), work), UNREAD_TOKENS),
}


def _run(regime: Regime, rule: str, rate: float, requests: int, seed: int) -> tuple[float, float, float]:
    """Bytes loaded, and p50 and p99 of the first token in seconds. One seed gives all rules the same requests."""
    drawn = draw(regime.lengths, regime.adapters, rate, requests, np.random.default_rng(seed))
    system = PARTS[DEFAULT]
    caching = replace(system.caching, share=regime.share)
    longest = max(one.answer_tokens for one in drawn)
    servers = {
        name: SimulatedServer(
            regime.machine, regime.adapters, system.scheduler, caching, longest, Oracle(ACCURACY, seed)
        )
        for name in NODES
    }
    make, work = _RULES[rule]
    results, places = run_fleet(servers, drawn, make(), LOOK_S, work)
    first = first_s(results, places)[int(requests * WARM) :]
    loaded = sum(result.loaded_bytes for result in results.values())
    return float(loaded), float(np.percentile(first, 50)), float(np.percentile(first, 99))
