"""Eviction alone: a sequence of adapter uses through a cache of bytes, by each algorithm, without scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from bench.adapter_cache.loads import names
from bench.common.output import Row, table
from shapeshift.adapter_cache.interfaces import AdapterInfo, EvictEntry
from shapeshift.adapter_cache.settings import EVICTION_RULES


def measure(adapters: Mapping[str, AdapterInfo], capacity: float, uses: int, seeds: Sequence[int]) -> str:
    """A table of bytes loaded, as a share of those without a cache, and hits over `uses` adapters drawn for each of
    `seeds`; `capacity` bytes of cache."""
    drawn = [names(adapters, uses, np.random.default_rng(seed)) for seed in seeds]
    uncached_bytes = sum(adapters[name].bytes for one in drawn for name in one)
    rows: list[Row] = []
    for algorithm in EVICTION_RULES:
        loaded, hits = np.sum([replay(adapters, capacity, one, algorithm) for one in drawn], axis=0).tolist()
        rows.append({"rule": algorithm, "of the bytes": loaded / uncached_bytes, "hits": hits / (uses * len(seeds))})
    share = capacity / sum(one.bytes for one in adapters.values())
    return table(f"eviction alone: {uses} uses, a cache of {share:.0%} of all adapters", rows)


def replay(
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
