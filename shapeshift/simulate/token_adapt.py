"""A device that runs batches at changing gammas, as discrete events over the policies that serve (OTAS)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shapeshift.token_adapt.adapter import AdaptRules, Query, TokenAdapter
from shapeshift.token_adapt.costs import Costs

Floats = NDArray[np.float64]

IN_TIME, LATE, EVICTED = 0, 1, 2


@dataclass(frozen=True)
class Load:
    """What arrives: `at_ms` rising, and for each query its latency requirement, utility and accuracy [n, gammas]."""

    at_ms: Floats
    latency_ms: Floats
    utility: Floats
    accuracy: Floats


@dataclass
class Served:
    """By query: its outcome, the index of its gamma (-1: never run) and when it was answered, ms; `batches` holds
    (when begun, gamma index, size, ms of planning) of each batch."""

    outcome: NDArray[np.int8]
    gamma: NDArray[np.int16]
    done_ms: Floats
    batches: list[tuple[float, int, int, float]] = field(default_factory=list)

    def gained(self, load: Load) -> float:
        """The utility that comes in expectation: of each query in time, its utility times its accuracy."""
        won = np.flatnonzero(self.outcome == IN_TIME)
        return float((load.utility[won] * load.accuracy[won, self.gamma[won]]).sum())


def run(
    costs: Costs,
    rules: AdaptRules,
    load: Load,
    switch_ms: Mapping[int, float] | None = None,
    noise: Callable[[], float] = lambda: 1.0,
) -> Served:
    """Serve `load` on one device.

    A batch takes the costs' time times `noise()`, and `switch_ms` of its gamma more where the batch before had another
    one (loading another model). Planning takes no time here.
    """
    count = len(load.at_ms)
    served = Served(np.full(count, EVICTED, np.int8), np.full(count, -1, np.int16), np.zeros(count))
    adapter = TokenAdapter(costs, rules, 0.0)
    true_ms = costs.times(list(range(rules.batching.size + 1)))
    clock, arrived, last = 0.0, 0, None
    while arrived < count or len(adapter):
        if not len(adapter):
            clock = max(clock, float(load.at_ms[arrived]))
        while arrived < count and load.at_ms[arrived] <= clock:
            adapter.add(_query(load, arrived))
            arrived += 1
        step = adapter.step(clock)
        for query in step.evicted:
            served.done_ms[query.item] = clock
        if not step.queries:
            continue
        took = float(true_ms[len(step.queries), step.gamma]) * noise()
        adapter.costs.observe(step.gamma, len(step.queries), took)
        if switch_ms and step.gamma != last:
            took += switch_ms.get(costs.gammas[step.gamma], 0.0) if last is not None else 0.0
        served.batches.append((clock, step.gamma, len(step.queries), step.plan_ms))
        clock, last = clock + took, step.gamma
        _record(served, step.queries, step.gamma, clock)
    return served


def _query(load: Load, index: int) -> Query:
    at = float(load.at_ms[index])
    return Query(at, at + float(load.latency_ms[index]), float(load.utility[index]), load.accuracy[index], index)


def _record(served: Served, queries: Sequence[Query], gamma: int, clock: float) -> None:
    for query in queries:
        served.outcome[query.item] = IN_TIME if clock < query.deadline else LATE
        served.gamma[query.item] = gamma
        served.done_ms[query.item] = clock
