"""Eviction alone: adapters used one after another through a cache of bytes, by each rule, without any scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from bench.adapter_loads import names
from shapeshift.adapter_cache import evict
from shapeshift.adapter_cache.evict import EvictEntry
from shapeshift.adapter_cache.interfaces import AdapterInfo


def measure(known: Mapping[str, AdapterInfo], room: float, uses: int, seeds: Sequence[int]) -> str:
    """A table of bytes loaded a use and of hits over `uses` adapters drawn for each of `seeds`."""
    drawn = [names(known, uses, np.random.default_rng(seed)) for seed in seeds]
    plain = sum(known[name].bytes for one in drawn for name in one)
    total = sum(one.bytes for one in known.values())
    lines = [
        f"\n=== eviction alone: {uses} uses, a cache of {room / total:.0%} of all adapters, no cache 1.000 of bytes"
    ]
    for rule in evict.ALGORITHMS:
        runs = [replay(known, room, one, rule) for one in drawn]
        loaded, hits = sum(one[0] for one in runs) / plain, sum(one[1] for one in runs) / (uses * len(seeds))
        lines.append(f"    {rule:10}{loaded:8.3f} of the bytes{hits:8.0%} hits")
    return "\n".join(lines)


def replay(known: Mapping[str, AdapterInfo], room: float, used: Sequence[str], rule: str) -> tuple[float, int]:
    """Bytes loaded, and how many of the uses found their adapter there."""
    kept: dict[str, EvictEntry] = {}
    counts: dict[str, int] = {}
    free, clock, loaded, hits = room, 0.0, 0.0, 0
    for now, name in enumerate(used):
        size = known[name].bytes
        counts[name] = counts.get(name, 0) + 1
        if name in kept:
            hits += 1
        else:
            gone, clock = evict.choose(list(kept.values()), size - free, clock, rule, now)
            free += sum(kept.pop(one).size for one in gone or ()) - size
            loaded += size
            kept[name] = EvictEntry(name, size, 0, now)
        kept[name] = replace(kept[name], freq=counts[name], last=now, base=clock)
    return loaded, hits
