"""The policies over a simulated decode loop with a linear law of iteration times, without server and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bench.adapter_cache import report
from bench.adapter_cache.loads import Lengths, adapter_set, draw
from bench.adapter_cache.report import CACHE, DEFAULT, ORDER, PLAIN, QUEUES, AdapterRun
from shapeshift.adapter_cache.policy.length_prediction import Oracle
from shapeshift.adapter_cache.policy.multiqueue import MultiQueue
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import SCHEDULERS, UNUSED
from shapeshift.simulate.adapter_cache import Machine, MakeScheduler, SimulatedRequest, run
from shapeshift.simulate.adapter_pool import CacheOptions

RECLUSTER_S = 60.0
ACCURACY = 0.8
"""Of the oracle that predicts answer lengths."""
GIB = 2**30
_RANK_BYTES, _CACHED, _MOST_CACHED = 2 * 2**20, 0.4, 0.5


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

    def requests(self, rate: float, count: int, seed: int) -> list[SimulatedRequest]:
        """Those of a run."""
        return draw(self.lengths, len(self.adapters), rate, count, np.random.default_rng(seed))

    def replay(self, system: System, rate: float, count: int, seed: int, accuracy: float = ACCURACY) -> AdapterRun:
        """One run. The same seed gives all systems the same requests. accuracy: of the predicted answer lengths."""
        requests = self.requests(rate, count, seed)
        caching = replace(system.caching, share=self.share)
        oracle = Oracle(accuracy, seed)
        result = run(self.machine, self.adapters, requests, system.scheduler, caching, oracle)
        ends = np.array([request.at_s for request in requests]) + result.last_s
        span_s = float(ends.max()) - requests[0].at_s
        counts = result.loaded_bytes, result.hits, result.misses
        return AdapterRun(result.first_s, result.last_s, result.between_s, *counts, span_s)

    @property
    def cache_bytes(self) -> float:
        """The most bytes of adapters that a cache holds."""
        return self.share * self.machine.pool_bytes

    def scaled(self, times: float, token: float, adapters: int, pool_gib: int) -> Regime:
        """That of another model: factors on the times and on the memory of a token; adapters, and the pool."""
        one = self.machine
        machine = replace(
            one,
            base_s=one.base_s * times,
            row_s=one.row_s * times,
            token_s=one.token_s * times,
            rank_s=one.rank_s * token,
            pool_bytes=pool_gib * GIB,
            token_bytes=int(one.token_bytes * token),
        )
        named = adapter_set(int(_RANK_BYTES * token), adapters)
        share = min(_MOST_CACHED, _CACHED * sum(adapter.bytes for adapter in named.values()) / machine.pool_bytes)
        return replace(self, machine=machine, adapters=named, share=share)

    def capacity(self, count: int) -> float:
        """Requests a second that the plain system serves when all arrive at once."""
        return report.served_per_s([self.replay(PARTS[PLAIN], 1e6, count, seed=10**6)])


def regimes() -> list[Regime]:
    """A Llama of 7 billion parameters on the paper's GPU, read from its figures; adapters of 2 MiB a rank.

    The scarce resource differs: time alone, memory for keys and values, or the link that adapters are loaded over. A
    cache holds at most 40% of the bytes of all adapters.
    """
    adapters = adapter_set(_RANK_BYTES)
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
    share = _CACHED * all_bytes / machine.pool_bytes
    tight = replace(machine, pool_bytes=10 * GIB)
    slow = replace(machine, load_bytes_s=1.5e9, slots=32)
    return [
        Regime("time is scarce", machine, Lengths.read(0.5, 4096), adapters, share),
        Regime("memory is scarce", tight, Lengths.read(0.5, 4096), adapters, _CACHED * all_bytes / tight.pool_bytes),
        Regime("the link is scarce", slow, Lengths.read(0.1, 1024), adapters, _CACHED * all_bytes / slow.pool_bytes),
    ]
