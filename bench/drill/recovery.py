"""Time until whole: when after a fault the requests are answered as they were before it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bench.drill.outcomes import RIGHT, Outcome

SLOWER = 2.0
"""The p99 within this factor of that before the fault is whole."""
WINDOW_S = 2.0
HOLD_S = 2.0
"""For so long every window must be whole."""
_STEP_S = 0.1
_LEAST = 10


def p99_by_front(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """The 99th percentile of the latency of each front's right answers, in seconds."""
    latencies: dict[str, list[float]] = defaultdict(list)
    for one in outcomes:
        if one.kind == RIGHT and not one.extra:
            latencies[one.front].append(one.latency_s)
    return {front: float(np.percentile(values, 99)) for front, values in latencies.items()}


def is_whole(window: Sequence[Outcome], before: Mapping[str, float]) -> bool:
    """Whether the p99 of latency over its front's p99 before is at most SLOWER, and every front had a right answer.

    A request without a right answer counts as infinitely late. A window of fewer than 10 requests tells nothing.
    """
    if len(window) < _LEAST:
        return False
    fronts = {one.front for one in window}
    if fronts - {one.front for one in window if one.kind == RIGHT}:
        return False
    slower = np.array([one.latency_s / before.get(one.front, math.inf) for one in window])
    return float(np.percentile(slower, 99, method="lower")) <= SLOWER


def time_until_whole(outcomes: Iterable[Outcome], began_s: float, ended_s: float, before: Mapping[str, float]) -> float:
    """Seconds from `began_s` to the first instant from which, for HOLD_S, every window of WINDOW_S is whole.

    A window holds the requests by their intended instants. Infinite where there is no such instant before `ended_s`.
    """
    sent = sorted((one for one in outcomes if not one.extra), key=lambda one: one.intended_s)
    instants = [one.intended_s for one in sent]

    def whole_from(start: float) -> bool:
        first, last = bisect_left(instants, start), bisect_left(instants, start + WINDOW_S)
        return is_whole(sent[first:last], before)

    needed = round(HOLD_S / _STEP_S) + 1
    held = 0
    for step in range(math.floor((ended_s - WINDOW_S - began_s) / _STEP_S) + 1):
        held = held + 1 if whole_from(began_s + step * _STEP_S) else 0
        if held == needed:
            return (step + 1 - needed) * _STEP_S
    return math.inf
