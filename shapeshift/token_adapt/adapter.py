"""Every decision from a query's arrival to its execution: batches, evictions, plan. Times in ms of any one clock.

The thread that executes owns it; the simulation drives the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.token_adapt import by_rate, plan
from shapeshift.token_adapt.batching import Batch, BatchQueue, BatchRules
from shapeshift.token_adapt.by_rate import RateWindow, SteadyChoice
from shapeshift.token_adapt.costs import Costs
from shapeshift.token_adapt.plan import SKIP, PlanProblem
from shapeshift.token_adapt.price import TimePrice

Floats = NDArray[np.float64]

BY_RATE, INFAAS = "by_rate", "infaas"
ALGORITHMS = (*plan.ALGORITHMS, BY_RATE, INFAAS)
_PAPERS = ("paper", "paper_printed")
_PRICED = ("grid", "front")


@dataclass(frozen=True)
class AdaptRules:
    """How it is decided.

    algorithm     a solver of `plan`; `paper` and `paper_printed` give way to Algorithm 3 at the start and where few
                  batches wait; by_rate: Algorithm 3 alone; infaas: one gamma for all, by the rate
    few_batches   the paper's beta; high_utility: its kappa; initial_ms: its initial stage
    price_window_ms  `grid`, `front`: a plan pays for its time what that was worth of late (`TimePrice`); 0: nothing
    margin_ms     time that answers take after a batch has run: deadlines count as so much earlier
    memory_mb     a batch must need less (1c)
    """

    algorithm: str = "grid"
    batching: BatchRules = field(default_factory=BatchRules)
    few_batches: int = 5
    high_utility: float = 0.8
    initial_ms: float = 2000.0
    tick_ms: float = plan.TICK_MS
    price_window_ms: float = 0.0
    margin_ms: float = 0.0
    memory_mb: float = float("inf")


@dataclass(eq=False)
class Query:
    """One image that waits. accuracy: its task's, 0..1, for each gamma of the costs; item: whatever the owner needs."""

    arrived: float
    deadline: float
    utility: float
    accuracy: Floats
    item: Any = None

    def __post_init__(self) -> None:
        self.brings = self.utility * self.accuracy
        """What it is worth in expectation, for each gamma of the costs."""


@dataclass(frozen=True)
class Step:
    """What to do now: run `queries` at the gamma of index `gamma`; those in `evicted` cannot make their deadlines."""

    queries: Sequence[Query]
    gamma: int
    evicted: Sequence[Query]
    plan_ms: float = 0.0


class TokenAdapter:
    """The queue of batches and the choice of what runs next."""

    def __init__(self, costs: Costs, rules: AdaptRules, started: float) -> None:
        self.costs = costs
        self.rules = rules
        self.rate = RateWindow()
        self._price = TimePrice(rules.price_window_ms) if rules.price_window_ms and rules.algorithm in _PRICED else None
        self.table = by_rate.table(costs.throughput(rules.batching.size))
        self._queue: BatchQueue[Query] = BatchQueue(rules.batching)
        self._steady = SteadyChoice(self.table)
        self._initial_until = started + rules.initial_ms
        self._infaas = rules.algorithm == INFAAS

    def __len__(self) -> int:
        return sum(len(batch) for batch in self._queue.batches)

    def add(self, query: Query) -> None:
        """A query has arrived."""
        self.rate.add(query.arrived)
        if self._price is not None:
            self._price.add(query.arrived, query.brings)
        self._queue.add(query)

    def remove(self, unwanted: Callable[[Query], bool]) -> list[Query]:
        """Take out the queries of which that is true."""
        gone = {query for batch in self._queue.batches for query in batch.queries if unwanted(query)}
        if gone:
            left = [[query for query in batch.queries if query not in gone] for batch in self._queue.batches]
            self._queue.batches = [Batch(queries) for queries in left if queries]
        return list(gone)

    def step(self, now: float) -> Step:
        """What to do now. Where queries are left after the evictions, some run."""
        evicted = self._divide_late(now)
        if not self._queue.batches:
            return Step((), SKIP, evicted)
        before = time.perf_counter()
        batches = sorted(self._queue.batches, key=lambda batch: batch.deadline)
        times = self._times(batches)
        chosen, gamma = self._first(now, batches, times, self._plan(now, batches, times))
        self._queue.batches.remove(chosen)
        return Step(chosen.queries, gamma, evicted, (time.perf_counter() - before) * 1e3)

    def _plan(self, now: float, batches: Sequence[Batch[Query]], times: Floats) -> Sequence[int]:
        rules = self.rules
        deadlines = np.array([batch.deadline for batch in batches]) - rules.margin_ms
        few = len(batches) <= rules.few_batches or now < self._initial_until
        if rules.algorithm == INFAAS:
            return [self._only(now)] * len(batches)
        if rules.algorithm == BY_RATE or (rules.algorithm in _PAPERS and few):
            worth = [float(np.mean([query.utility for query in batch.queries])) for batch in batches]
            rate = self.rate.rate(now)
            ends = deadlines.tolist()
            return by_rate.allocate(
                now, rate, self.table, self.costs.gammas, ends, times.tolist(), worth, rules.high_utility
            )
        problem = PlanProblem(now, deadlines, times, _utilities(batches))
        price = 0.0 if self._price is None else self._price.price(now, self._times_of_one())
        if price:
            planned = plan.solve(problem.priced(price), rules.algorithm, rules.tick_ms)
            if any(gamma != SKIP for gamma in planned):
                return planned
        # Nothing is worth its price: better than nothing, for the device is free.
        return plan.solve(problem, rules.algorithm, rules.tick_ms)

    def _first(
        self, now: float, batches: Sequence[Batch[Query]], times: Floats, planned: Sequence[int]
    ) -> tuple[Batch[Query], int]:
        """The first planned batch that makes its deadline; without one the first of all, as fast as can be."""
        for index, gamma in enumerate(planned):
            if gamma != SKIP and now + times[index, gamma] + self.rules.margin_ms < batches[index].deadline:
                return batches[index], gamma
        return batches[0], self._only(now) if self._infaas else int(np.argmin(times[0]))

    def _times_of_one(self) -> Floats:
        """[g]: ms of the device that an image of a full batch takes."""
        size = self.rules.batching.size
        found: Floats = self.costs.times([size])[0] / size
        return found

    def _only(self, now: float) -> int:
        return self.costs.gammas.index(self._steady.choose(now, self.rate.rate(now)))

    def _times(self, batches: Sequence[Batch[Query]]) -> Floats:
        counts = [len(batch) for batch in batches]
        allowed = self.costs.memory(counts) < self.rules.memory_mb
        found: Floats = np.where(allowed, self.costs.times(counts), np.inf)
        return found

    def _fastest(self, now: float, count: int) -> float:
        """When a batch of that size can have been answered at best."""
        if self._infaas:
            return now + float(self.costs.times([count])[0, self._only(now)]) + self.rules.margin_ms
        return now + self.costs.fastest(count) + self.rules.margin_ms

    def _divide_late(self, now: float) -> list[Query]:
        """Make smaller batches of queries whose deadline their own cannot make; those evicted that can in none."""
        kept: list[Batch[Query]] = []
        evicted: list[Query] = []
        any_end = self._fastest(now, self.rules.batching.size)
        for batch in self._queue.batches:
            if any_end < batch.deadline or (end := self._fastest(now, len(batch))) < batch.deadline:
                kept.append(batch)
                continue
            urgent = sorted((q for q in batch.queries if q.deadline <= end), key=lambda query: query.deadline)
            patient = [query for query in batch.queries if query.deadline > end]
            lost = [query for query in urgent if query.deadline <= self._fastest(now, 1)]
            evicted += lost
            kept += self._small_batches(now, urgent[len(lost) :])
            if patient:
                kept.append(Batch(patient))
        self._queue.batches = kept
        return evicted

    def _small_batches(self, now: float, urgent: Sequence[Query]) -> list[Batch[Query]]:
        """Batches of queries in order of deadline, each as large as its first one's deadline allows."""
        made: list[Batch[Query]] = []
        for query in urgent:
            if made and self._fastest(now, len(made[-1]) + 1) < made[-1].deadline:
                made[-1].add(query)
            else:
                made.append(Batch([query]))
        return made


def _utilities(batches: Sequence[Batch[Query]]) -> Floats:
    """[b, g]: what the queries of each batch are worth in expectation at each gamma."""
    brings = np.array([query.brings for batch in batches for query in batch.queries])
    firsts = np.cumsum([0, *(len(batch) for batch in batches[:-1])])
    found: Floats = np.add.reduceat(brings, firsts, axis=0)
    return found
