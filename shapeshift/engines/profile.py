"""Measuring engine latencies, with the lengths interleaved as in service."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from shapeshift.engines.interfaces import Array
from shapeshift.engines.manifest import Latency

# How much longer than another a call may take on the clock for the same processor time because it uses fewer cores.
_SPREAD = 1.3


def measure_interleaved(
    calls: Sequence[tuple[int, Callable[[], object]]], budget_s: float, seed: int = 0, rounds: int = 7
) -> list[Latency]:
    """Latency of each (tokens, call), single-threaded; see `sample`."""
    clock_ms, _ = sample([call for _, call in calls], budget_s, seed, rounds)
    return [
        Latency(tokens, 1, *quantiles(times), round(float(times.min()), 4))
        for (tokens, _), times in zip(calls, clock_ms, strict=True)
    ]


def sample(
    calls: Sequence[Callable[[], object]], budget_s: float, seed: int = 0, rounds: int = 7
) -> tuple[Array, Array]:
    """Milliseconds of each call in each round after one warm-up call each: on the clock, and of processor time.

    Both are [calls, rounds]. Each round runs every call once, in one random order: a dynamic graph then pays for its
    changes of shape here as it does in service. With a new order in each round, the end of one and the beginning of the
    next could hold the same shape of it, and the smallest sample would be one that no change has cost. At least three
    rounds run; after that they stop once `budget_s` seconds have passed.
    """
    for call in calls:
        call()
    order = list(range(len(calls)))
    random.Random(seed).shuffle(order)
    samples = []
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - start > budget_s:
            break
        times = np.empty((len(calls), 2))
        for index in order:
            clock, processor = time.perf_counter(), time.process_time()
            calls[index]()
            times[index] = time.perf_counter() - clock, time.process_time() - processor
        samples.append(times * 1e3)
    clock_ms, processor_ms = np.array(samples).transpose(2, 1, 0)
    return clock_ms, processor_ms


def quantiles(times: Array) -> tuple[float, float]:
    """Median and 99th percentile."""
    median, p99 = np.percentile(times, [50, 99])
    return round(float(median), 4), round(float(p99), 4)


def idle_ms(clock_ms: Array, processor_ms: Array) -> Array:
    """What calls of one size would take on an idle machine [calls], from samples [calls, rounds] on a busy one.

    Other programs add to the clock, unevenly, but not to the processor time: this says how the calls compare. How long
    it lasts on the clock is taken from each call's best sample, but not above 1.3 times what the best of all needs.
    """
    stretch = (clock_ms / np.maximum(processor_ms, 1e-6)).min(axis=1)
    idle: Array = np.median(processor_ms, axis=1) * np.minimum(stretch, _SPREAD * stretch.min())
    return idle
