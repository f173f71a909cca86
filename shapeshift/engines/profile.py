"""Measuring engines: calls of all lengths in turn, since that is how they will be used."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from shapeshift.engines.manifest import Latency


def interleaved(
    calls: Sequence[tuple[int, Callable[[], object]]], budget_s: float, seed: int = 0, rounds: int = 7
) -> list[Latency]:
    """Latency of each (tokens, call), single-threaded, after one warm-up call each.

    Every round runs every call once, in a new random order, so that a graph that prepares itself anew at
    each change of shape pays for it here as it will in service. Rounds stop early at `budget_s` seconds,
    but not before three.
    """
    samples: list[list[float]] = [[] for _ in calls]
    for _, call in calls:
        call()
    order = list(range(len(calls)))
    shuffler = random.Random(seed)
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - start > budget_s:
            break
        shuffler.shuffle(order)
        for index in order:
            before = time.perf_counter()
            calls[index][1]()
            samples[index].append((time.perf_counter() - before) * 1e3)
    return [_summary(tokens, times) for (tokens, _), times in zip(calls, samples, strict=True)]


def _summary(tokens: int, times: Sequence[float]) -> Latency:
    median, p99 = np.percentile(times, [50, 99])
    return Latency(tokens, 1, round(float(median), 4), round(float(p99), 4), round(min(times), 4))
