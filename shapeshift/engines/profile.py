"""Measuring engine latencies, with the lengths interleaved as in service."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from shapeshift.engines.manifest import Latency


def measure_interleaved(
    calls: Sequence[tuple[int, Callable[[], object]]], budget_s: float, seed: int = 0, rounds: int = 7
) -> list[Latency]:
    """Latency of each (tokens, call), single-threaded, after one warm-up call each.

    Each round runs every call once, in one random order: a dynamic graph then pays for its changes of shape here as it
    does in service. With a new order in each round, the end of one and the beginning of the next could hold the same
    shape of it, and the smallest sample would be one that no change has cost. At least three rounds run; after that
    they stop once `budget_s` seconds have passed.
    """
    samples: list[list[float]] = [[] for _ in calls]
    for _, call in calls:
        call()
    order = list(range(len(calls)))
    random.Random(seed).shuffle(order)
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - start > budget_s:
            break
        for index in order:
            before = time.perf_counter()
            calls[index][1]()
            samples[index].append((time.perf_counter() - before) * 1e3)
    return [_summary(tokens, times) for (tokens, _), times in zip(calls, samples, strict=True)]


def _summary(tokens: int, times: Sequence[float]) -> Latency:
    median, p99 = np.percentile(times, [50, 99])
    return Latency(tokens, 1, round(float(median), 4), round(float(p99), 4), round(min(times), 4))
