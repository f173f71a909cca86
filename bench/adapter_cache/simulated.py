"""The policies over a simulated decode loop with a linear law of iteration times, without server and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bench.adapter_cache import report
from bench.adapter_cache.loads import Lengths, adapter_set, draw
from bench.adapter_cache.report import CACHE, DEFAULT, ORDER, PLAIN, QUEUES, AdapterRun
from bench.common.output import Row, table
from shapeshift.adapter_cache.policy.eviction import EvictEntry
from shapeshift.adapter_cache.policy.length_prediction import Oracle
from shapeshift.adapter_cache.policy.multiqueue import MultiQueue
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import EVICTION_RULES, SCHEDULERS, UNUSED
from shapeshift.simulate.adapter_cache import Machine, MakeScheduler, run
from shapeshift.simulate.adapter_pool import CacheOptions
from shapeshift.workloads.adapters import names

RECLUSTER_S = 60.0
ACCURACY = 0.8
"""Of the oracle that predicts answer lengths."""
GIB = 2**30


@dataclass(frozen=True)
class System:
    """A scheduler and a cache."""

    scheduler: MakeScheduler
    caching: CacheOptions


def scheduled(scheduler: str) -> MakeScheduler:
    return partial(MultiQueue, recluster_s=RECLUSTER_S) if scheduler == "chameleon" else SCHEDULERS[scheduler]


PARTS = {
    PLAIN: System(scheduled("fifo"), CacheOptions(eviction=UNUSED)),
    CACHE: System(scheduled("fifo"), CacheOptions()),
    ORDER: System(scheduled("arrival"), CacheOptions(eviction=UNUSED)),
    DEFAULT: System(scheduled("arrival"), CacheOptions()),
    "chameleon, no cache": System(scheduled("chameleon"), CacheOptions(eviction=UNUSED)),
    QUEUES: System(scheduled("chameleon"), CacheOptions()),
    "sjf, cache": System(scheduled("sjf"), CacheOptions()),
    "wrs, cache": System(scheduled("wrs"), CacheOptions()),
}


@dataclass(frozen=True)
class Regime:
    """A machine under the trace. share: of the pool, that the cache may hold."""

    name: str
    machine: Machine
    lengths: Lengths
    adapters: Mapping[str, AdapterInfo]
    share: float

    def replay(self, system: System, rate: float, count: int, seed: int) -> AdapterRun:
        """One run. The same seed gives all systems the same requests."""
        requests = draw(self.lengths, len(self.adapters), rate, count, np.random.default_rng(seed))
        caching = replace(system.caching, share=self.share)
        oracle = Oracle(ACCURACY, seed)
        result = run(self.machine, self.adapters, requests, system.scheduler, caching, oracle)
        ends = np.array([request.at_s for request in requests]) + result.last_s
        span_s = float(ends.max()) - requests[0].at_s
        counts = result.loaded_bytes, result.hits, result.misses
        return AdapterRun(result.first_s, result.last_s, result.between_s, *counts, span_s)

    @property
    def cache_bytes(self) -> float:
        """The most bytes of adapters that a cache holds."""
        return self.share * self.machine.pool_bytes

    def capacity(self, count: int) -> float:
        """Requests a second that the plain system serves when all arrive at once."""
        return report.served_per_s([self.replay(PARTS[PLAIN], 1e6, count, seed=10**6)])


def regimes() -> list[Regime]:
    """A Llama of 7 billion parameters on the paper's GPU, read from its figures; adapters of 2 MiB a rank.

    The scarce resource differs: time alone, memory for keys and values, or the link that adapters are loaded over. A
    cache holds at most 40% of the bytes of all adapters.
    """
    adapters = adapter_set(2 * 2**20)
    all_bytes = sum(adapter.bytes for adapter in adapters.values())
    machine = Machine(
        slots=64,
        prefill_tokens=512,
        base_s=0.025,
        row_s=0.0003,
        token_s=0.00015,
        rank_s=0.000005,
        load_bytes_s=8e9,
        pool_bytes=28 * GIB,
        token_bytes=2**19,
    )
    share = 0.4 * all_bytes / machine.pool_bytes
    tight = replace(machine, pool_bytes=10 * GIB)
    slow = replace(machine, load_bytes_s=1.5e9, slots=32)
    return [
        Regime("time is scarce", machine, Lengths.read(0.5, 4096), adapters, share),
        Regime("memory is scarce", tight, Lengths.read(0.5, 4096), adapters, 0.4 * all_bytes / tight.pool_bytes),
        Regime("the link is scarce", slow, Lengths.read(0.1, 1024), adapters, 0.4 * all_bytes / slow.pool_bytes),
    ]


def measure_evictions(adapters: Mapping[str, AdapterInfo], capacity: float, uses: int, seeds: Sequence[int]) -> str:
    """A table of bytes loaded, as a share of those without a cache, and hits over `uses` adapters drawn for each of
    `seeds`; `capacity` bytes of cache."""
    drawn = [names(len(adapters), uses, np.random.default_rng(seed)) for seed in seeds]
    uncached_bytes = sum(adapters[name].bytes for one in drawn for name in one)
    rows: list[Row] = []
    # Without a cache nothing is evicted.
    for algorithm in [name for name in EVICTION_RULES if name != UNUSED]:
        loaded, hits = np.sum([_evicted(adapters, capacity, one, algorithm) for one in drawn], axis=0).tolist()
        rows.append({"rule": algorithm, "of the bytes": loaded / uncached_bytes, "hits": hits / (uses * len(seeds))})
    share = capacity / sum(one.bytes for one in adapters.values())
    return table(f"eviction alone: {uses} uses, a cache of {share:.0%} of all adapters", rows)


def _evicted(
    adapters: Mapping[str, AdapterInfo], capacity: float, used: Sequence[str], algorithm: str
) -> tuple[float, int]:
    """Bytes loaded, and the number of uses that hit."""
    cached: dict[str, EvictEntry] = {}
    counts: dict[str, int] = {}
    free, clock, loaded, hits = capacity, 0.0, 0.0, 0
    for now, name in enumerate(used):
        size = adapters[name].bytes
        counts[name] = counts.get(name, 0) + 1
        if name in cached:
            hits += 1
        else:
            evicted, clock = EVICTION_RULES[algorithm].choose(list(cached.values()), size - free, clock, now)
            free += sum(cached.pop(one).size for one in evicted or ()) - size
            loaded += size
            cached[name] = EvictEntry(name, size, 0, now)
        cached[name] = replace(cached[name], freq=counts[name], last=now, base=clock)
    return loaded, hits


def measure(regime: Regime, loads: Sequence[float], count: int, seeds: Sequence[int]) -> str:
    """Tables of the systems over `loads`, shares of the plain system's capacity."""
    capacity = regime.capacity(count)
    lines = [f"\n=== simulated: {regime.name}; capacity of {PLAIN}: {capacity:.2f} requests/s"]
    for load in loads:
        systems = {
            name: [regime.replay(system, capacity * load, count, seed) for seed in seeds]
            for name, system in PARTS.items()
        }
        lines.append(report.systems_table(f"load {load:.0%}", systems))
    return "\n".join(lines)
