"""All decisions from an image's arrival to its execution: batching, eviction, planning. Times in ms of any one clock.

One thread owns a scheduler: the executor's, or the simulation's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shapeshift.token_adapt.policy import plan
from shapeshift.token_adapt.policy.baselines import rate_based
from shapeshift.token_adapt.policy.baselines.rate_based import ArrivalRate, InfaasSelector
from shapeshift.token_adapt.policy.batching import Batch, BatchQueue, BatchSettings
from shapeshift.token_adapt.policy.costs import Costs
from shapeshift.token_adapt.policy.problem import SKIP, PlanProblem
from shapeshift.token_adapt.policy.shadow_price import ShadowPrice

Floats = NDArray[np.float64]

BY_RATE, INFAAS = "by_rate", "infaas"
ALGORITHMS = (*plan.ALGORITHMS, BY_RATE, INFAAS)
_WITH_RATE_FALLBACK = ("paper", "paper_printed")
_WITH_SHADOW_PRICE = ("grid", "front")


@dataclass(frozen=True)
class SchedulerSettings:
    """How the scheduler decides.

    algorithm        a solver of `plan`, where `paper` and `paper_printed` use Algorithm 3 in the initial stage and when
                     few batches wait; by_rate: Algorithm 3 only; infaas: one gamma for all batches, by the rate
    few_batches      the paper's beta; high_utility: its kappa; initial_ms: its initial stage
    price_window_ms  `grid`, `front`: window of the shadow price of device time (`ShadowPrice`); 0: time is free
    margin_ms        time between the end of a batch and its answers; deadlines count as this much earlier
    memory_mb        limit of a batch, exclusive (1c)
    """

    algorithm: str = "grid"
    batching: BatchSettings = field(default_factory=BatchSettings)
    few_batches: int = 5
    high_utility: float = 0.8
    initial_ms: float = 2000.0
    tick_ms: float = plan.TICK_MS
    price_window_ms: float = 0.0
    margin_ms: float = 0.0
    memory_mb: float = float("inf")


@dataclass(eq=False)
class WaitingImage:
    """One image in the queue. accuracy [g]: its task's (0..1) at each gamma of the costs; NaN: it has no such gamma."""

    arrival: float
    deadline: float
    utility: float
    accuracy: Floats

    def __post_init__(self) -> None:
        self.expected_utility = self.utility * np.nan_to_num(self.accuracy)
        self.excluded = frozenset(np.flatnonzero(np.isnan(self.accuracy)).tolist())


ImageT = TypeVar("ImageT", bound=WaitingImage)


@dataclass(frozen=True)
class Step(Generic[ImageT]):
    """One decision: run `images` as a batch at the gamma of index `gamma`. `evicted` cannot meet their deadlines."""

    images: Sequence[ImageT]
    gamma: int
    evicted: Sequence[ImageT]
    plan_ms: float = 0.0


class ImageScheduler(Generic[ImageT]):
    """The queue of batches, and the choice of the next one."""

    def __init__(self, costs: Costs, settings: SchedulerSettings, started: float) -> None:
        self.costs = costs
        self.settings = settings
        self.arrival_rate = ArrivalRate()
        self.rate_table = rate_based.rate_table(costs.throughput(settings.batching.max_size))
        self._queue: BatchQueue[ImageT] = BatchQueue(settings.batching)
        self._initial_until = started + settings.initial_ms
        self._infaas = InfaasSelector(self.rate_table) if settings.algorithm == INFAAS else None
        has_price = settings.price_window_ms > 0 and settings.algorithm in _WITH_SHADOW_PRICE
        self._shadow_price = ShadowPrice(settings.price_window_ms) if has_price else None

    def __len__(self) -> int:
        """Images that wait."""
        return sum(len(batch) for batch in self._queue.batches)

    def add(self, image: ImageT) -> None:
        """Queue an image that has arrived."""
        self.arrival_rate.add(image.arrival)
        if self._shadow_price is not None:
            self._shadow_price.add(image.arrival, image.expected_utility)
        self._queue.add(image)

    def remove(self, unwanted: Callable[[ImageT], bool]) -> list[ImageT]:
        """Remove and return the images for which `unwanted` is true."""
        removed = {image for batch in self._queue.batches for image in batch.images if unwanted(image)}
        if removed:
            kept = [[image for image in batch.images if image not in removed] for batch in self._queue.batches]
            self._queue.batches = [Batch(images) for images in kept if images]
        return list(removed)

    def step(self, now: float) -> Step[ImageT]:
        """Evict, plan, and take the next batch out of the queue. The step has images unless the queue is empty."""
        evicted = self._evict_late(now)
        if not self._queue.batches:
            return Step((), SKIP, evicted)
        began = time.perf_counter()
        batches = sorted(self._queue.batches, key=lambda batch: batch.deadline)
        times = self._allowed_times(batches)
        batch, gamma = self._first_feasible(now, batches, times, self._plan(now, batches, times))
        self._queue.batches.remove(batch)
        return Step(batch.images, gamma, evicted, (time.perf_counter() - began) * 1e3)

    # Planning.

    def _plan(self, now: float, batches: Sequence[Batch[ImageT]], times: Floats) -> Sequence[int]:
        """A gamma index or SKIP for each batch."""
        algorithm = self.settings.algorithm
        if self._infaas is not None:
            gamma = self._infaas_gamma(self._infaas, now)
            return [self._nearest(batch.excluded)[gamma] for batch in batches]
        few_batches = len(batches) <= self.settings.few_batches or now < self._initial_until
        if algorithm == BY_RATE or (algorithm in _WITH_RATE_FALLBACK and few_batches):
            return self._plan_by_rate(now, batches, times)
        problem = PlanProblem(now, self._deadlines(batches), times, _expected_utilities(batches))
        if self._shadow_price is not None:
            price = self._shadow_price.at(now, self._times_per_image())
            if price:
                planned = plan.solve(problem.with_shadow_price(price), algorithm, self.settings.tick_ms)
                if any(gamma != SKIP for gamma in planned):
                    return planned
        # No batch is worth its price, but an idle device gains nothing: plan without the price.
        return plan.solve(problem, algorithm, self.settings.tick_ms)

    def _plan_by_rate(self, now: float, batches: Sequence[Batch[ImageT]], times: Floats) -> list[int]:
        columns = [self._nearest(batch.excluded) for batch in batches]
        planned = rate_based.allocate(
            now,
            self.arrival_rate.at(now),
            self.rate_table,
            self.costs.gammas,
            self._deadlines(batches).tolist(),
            [batch_times[own].tolist() for batch_times, own in zip(times, columns, strict=True)],
            [float(np.mean([image.utility for image in batch.images])) for batch in batches],
            self.settings.high_utility,
        )
        return [own[gamma] for own, gamma in zip(columns, planned, strict=True)]

    def _first_feasible(
        self, now: float, batches: Sequence[Batch[ImageT]], times: Floats, planned: Sequence[int]
    ) -> tuple[Batch[ImageT], int]:
        """The first planned batch that meets its deadline; if there is none, the first batch at its fastest gamma."""
        for index, gamma in enumerate(planned):
            if gamma != SKIP and now + times[index, gamma] + self.settings.margin_ms < batches[index].deadline:
                return batches[index], gamma
        if self._infaas is not None:
            return batches[0], self._nearest(batches[0].excluded)[self._infaas_gamma(self._infaas, now)]
        return batches[0], int(np.argmin(times[0]))

    def _infaas_gamma(self, infaas: InfaasSelector, now: float) -> int:
        return self.costs.gammas.index(infaas.select(now, self.arrival_rate.at(now)))

    def _nearest(self, excluded: frozenset[int]) -> list[int]:
        """For each gamma, by index, the nearest one that is not excluded; of two the smaller."""
        indices = range(len(self.costs.gammas))
        allowed = [index for index in indices if index not in excluded]
        return [min(allowed, key=lambda one: abs(one - index)) for index in indices] if excluded else list(indices)

    def _deadlines(self, batches: Sequence[Batch[ImageT]]) -> Floats:
        """[b] latest end of each batch."""
        return np.array([batch.deadline for batch in batches]) - self.settings.margin_ms

    def _allowed_times(self, batches: Sequence[Batch[ImageT]]) -> Floats:
        """[b, g] ms; inf where the memory does not suffice, and at gammas that the images do not have."""
        counts = [len(batch) for batch in batches]
        allowed = self.costs.memory(counts) < self.settings.memory_mb
        for row, batch in zip(allowed, batches, strict=True):
            row[list(batch.excluded)] = False
        times: Floats = np.where(allowed, self.costs.times(counts), np.inf)
        return times

    def _times_per_image(self) -> Floats:
        """[g] device ms of one image in a full batch."""
        size = self.settings.batching.max_size
        times: Floats = self.costs.times([size])[0] / size
        return times

    # Eviction.

    def _evict_late(self, now: float) -> list[ImageT]:
        """Move images that their batch would make late to smaller batches; evict those that are late even alone."""
        kept: list[Batch[ImageT]] = []
        evicted: list[ImageT] = []
        full_batch_ends: dict[frozenset[int], float] = {}
        for batch in self._queue.batches:
            excluded = batch.excluded
            if excluded not in full_batch_ends:
                full_batch_ends[excluded] = self._earliest_answer(now, self.settings.batching.max_size, excluded)
            answer = full_batch_ends[excluded]
            if answer >= batch.deadline:
                answer = self._earliest_answer(now, len(batch), excluded)
            if answer < batch.deadline:
                kept.append(batch)
                continue
            urgent = sorted((image for image in batch.images if image.deadline <= answer), key=lambda i: i.deadline)
            patient = [image for image in batch.images if image.deadline > answer]
            late = [image for image in urgent if image.deadline <= self._earliest_answer(now, 1, excluded)]
            evicted += late
            kept += self._small_batches(now, urgent[len(late) :])
            if patient:
                kept.append(Batch(patient))
        self._queue.batches = kept
        return evicted

    def _small_batches(self, now: float, urgent: Sequence[ImageT]) -> list[Batch[ImageT]]:
        """Batches of images in order of deadline, each as large as the deadline of its first image allows."""
        batches: list[Batch[ImageT]] = []
        for image in urgent:
            if batches and self._earliest_answer(now, len(batches[-1]) + 1, image.excluded) < batches[-1].deadline:
                batches[-1].add(image)
            else:
                batches.append(Batch([image]))
        return batches

    def _earliest_answer(self, now: float, count: int, excluded: frozenset[int]) -> float:
        """When a batch of `count` images without the gammas `excluded` can be answered if it starts now."""
        if self._infaas is not None:
            gamma = self._nearest(excluded)[self._infaas_gamma(self._infaas, now)]
            took = float(self.costs.times([count])[0, gamma])
        else:
            took = self.costs.min_time(count, excluded)
        return now + took + self.settings.margin_ms


def _expected_utilities(batches: Sequence[Batch[ImageT]]) -> Floats:
    """[b, g]: expected utility of the images of each batch at each gamma."""
    utilities = np.array([image.expected_utility for batch in batches for image in batch.images])
    starts = np.cumsum([0, *(len(batch) for batch in batches[:-1])])
    sums: Floats = np.add.reduceat(utilities, starts, axis=0)
    return sums
