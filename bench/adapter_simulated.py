"""Simulated: the policies over a decode loop whose iterations take what a linear law says. No server, no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench import adapter_report as report
from bench.adapter_loads import Lengths, adapters, draw
from bench.adapter_report import CACHE, DEFAULT, ORDER, PLAIN, QUEUES, Outcome
from shapeshift.adapter_cache import evict
from shapeshift.adapter_cache.interfaces import AdapterInfo
from shapeshift.adapter_cache.predict import Oracle
from shapeshift.adapter_cache.scheduling import SchedulingSettings
from shapeshift.simulate.adapter_cache import Machine, run
from shapeshift.simulate.adapter_pool import Caching

RECLUSTER_S = 60.0
GIB = 2**30


@dataclass(frozen=True)
class System:
    """How requests are admitted and adapters kept. accuracy: of an oracle of answers' lengths; None: running means."""

    own: SchedulingSettings
    caching: Caching
    accuracy: float | None = 0.8


def scheduled(scheduler: str, **own: object) -> SchedulingSettings:
    return SchedulingSettings(scheduler=scheduler, recluster_s=RECLUSTER_S, **own)  # type: ignore[arg-type]


PARTS = {
    PLAIN: System(scheduled("fifo"), Caching(keeps=False)),
    CACHE: System(scheduled("fifo"), Caching()),
    ORDER: System(scheduled("arrival"), Caching(keeps=False)),
    DEFAULT: System(scheduled("arrival"), Caching()),
    "chameleon, no cache": System(scheduled("chameleon"), Caching(keeps=False)),
    QUEUES: System(scheduled("chameleon"), Caching()),
    "sjf, cache": System(scheduled("sjf"), Caching()),
    "wrs, cache": System(scheduled("wrs"), Caching()),
}
_OTHERS = [name for name in evict.ALGORITHMS if name != Caching().eviction]
EVICTIONS = {f"default, {name}": System(scheduled("arrival"), Caching(eviction=name)) for name in _OTHERS}
PREFETCH = {"default, predicting": System(scheduled("arrival"), Caching(predicts=True))}
PREDICTORS = {
    f"{QUEUES}, means": replace(PARTS[QUEUES], accuracy=None),
    **{f"{QUEUES}, {share:.0%}": replace(PARTS[QUEUES], accuracy=share) for share in (1.0, 0.6)},
}


@dataclass(frozen=True)
class Regime:
    """A machine under the trace. capacity: requests a second that FIFO without a cache can serve at most."""

    name: str
    machine: Machine
    lengths: Lengths
    known: Mapping[str, AdapterInfo]
    share: float

    def replay(self, system: System, rate: float, count: int, seed: int) -> Outcome:
        """One run; the same seed gives all systems the same requests."""
        asks = draw(self.lengths, self.known, rate, count, np.random.default_rng(seed))
        predictor = None if system.accuracy is None else Oracle(system.accuracy, seed)
        caching = replace(system.caching, share=self.share)
        got = run(self.machine, self.known, asks, system.own, caching, predictor)
        ranks = np.array([self.known[str(ask.adapter)].rank for ask in asks])
        ends = np.array([ask.at_s for ask in asks]) + got.last_s
        span = float(ends.max()) - asks[0].at_s
        return Outcome(ranks, got.first_s, got.last_s, got.between_s, got.loaded_bytes, got.hits, got.misses, span)

    @property
    def kept_bytes(self) -> float:
        """Of adapters that a cache holds at most."""
        return self.share * self.machine.pool_bytes

    def capacity(self, count: int) -> float:
        """Requests a second that the plain system serves when all are there at once."""
        return report.served_per_s([self.replay(PARTS[PLAIN], 1e6, count, seed=10**6)])


def regimes() -> list[Regime]:
    """A Llama of 7 billion parameters on a GPU as in the paper, readings of its figures; adapters of 2 MiB a rank.

    They differ in what is scarce: nothing beside time, memory for keys and values, or the link for adapters. A
    cache holds at most 40% of the bytes of all adapters.
    """
    known = adapters(2 * 2**20)
    all_bytes = sum(one.bytes for one in known.values())
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
        Regime("time is scarce", machine, Lengths.read(0.5, 4096), known, share),
        Regime("memory is scarce", tight, Lengths.read(0.5, 4096), known, 0.4 * all_bytes / tight.pool_bytes),
        Regime("the link is scarce", slow, Lengths.read(0.1, 1024), known, 0.4 * all_bytes / slow.pool_bytes),
    ]


def measure(regime: Regime, loads: Sequence[float], count: int, seeds: Sequence[int], further: bool) -> str:
    """Tables of the systems over `loads`, as shares of the plain system's capacity; further: of all near it."""
    capacity = regime.capacity(count)
    lines = [f"\n=== simulated: {regime.name}; capacity of {PLAIN}: {capacity:.2f} requests/s"]
    p99: dict[str, list[float]] = {}
    for load in loads:
        rest = {**EVICTIONS, **PREFETCH, **PREDICTORS} if further and load == loads[0] else {}
        systems = {
            name: [regime.replay(system, capacity * load, count, seed) for seed in seeds]
            for name, system in {**PARTS, **rest}.items()
        }
        lines.append(report.table(f"load {load:.0%}", systems))
        lines += [report.by_rank(systems[name], systems[PLAIN], (name, PLAIN)) for name in (DEFAULT, QUEUES)]
        for name in PARTS:
            p99.setdefault(name, []).append(report.first_ms(systems[name], 99))
    calm = [regime.replay(PARTS[PLAIN], capacity * 0.2, count // 4, seed) for seed in seeds]
    slo_ms = 5 * report.first_ms(calm, 50)
    lines.append(f"\n  load at which p99 first token reaches {slo_ms:.0f} ms (5 times the calm median)")
    for name, values in p99.items():
        lines.append(f"    {name:26}{report.at_objective(loads, values, slo_ms):6.2f}")
    return "\n".join(lines)
