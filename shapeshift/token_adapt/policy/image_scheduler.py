"""All decisions from an image's arrival to its execution: batching, eviction, planning. Times in ms of any one clock.

One thread owns a scheduler: the executor's, or the simulation's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shapeshift.serving.bounds import OVERTAKEN, SloClasses, classes_of
from shapeshift.settings import Choices, require
from shapeshift.token_adapt.policy import plan
from shapeshift.token_adapt.policy.batching import Batch, BatchQueue
from shapeshift.token_adapt.policy.costs import Costs
from shapeshift.token_adapt.policy.plan import SKIP, PlanProblem, ShadowPrice

Floats = NDArray[np.float64]


class Baseline(Protocol):
    """A scheme that chooses gammas by the arrival rate. Gammas are indices into those of the costs."""

    def add(self, arrival: float) -> None: ...

    def plan(
        self,
        now: float,
        deadlines: Sequence[float],
        times: Sequence[Sequence[float]],
        mean_utilities: Sequence[float],
    ) -> list[int]:
        """A gamma for each batch, where `only_gamma` gives none; times [b][g] and deadlines [b] in ms."""
        ...

    def only_gamma(self, now: float) -> int | None:
        """The one that all batches run at, however late they are; None: any."""
        ...


_RATE_BASED = "shapeshift.token_adapt.policy.baselines.rate_based"
_BY_RATE = f"{_RATE_BASED}:ByRate"
# `paper` and `paper_printed` use Algorithm 3 in the initial stage and when few batches wait.
_BASELINES: Choices[Callable[[Costs], Baseline]] = Choices(
    "algorithm",
    {"paper": _BY_RATE, "paper_printed": _BY_RATE, "by_rate": _BY_RATE, "infaas": f"{_RATE_BASED}:Infaas"},
)
ALGORITHMS = tuple(dict.fromkeys((*plan.ALGORITHMS, *_BASELINES)))
# Algorithm 1's delta.
_WINDOW_MS = 500.0
# The paper's beta, and its initial stage.
_FEW_BATCHES, _INITIAL_MS = 5, 2000.0
_LEAD_SMOOTHING = 0.1


@dataclass(frozen=True)
class SchedulerSettings:
    """How the scheduler decides.

    algorithm          grid, front, paper, paper_printed, by_rate or infaas
    batch_deadline_ms  most difference between the deadlines of a batch (Algorithm 1's eta)
    batch_utility      most difference between the utilities of a batch (Algorithm 1's mu)
    price_window_ms    grid, front: window of the shadow price of device time (`ShadowPrice`); 0: time is free
    margin_ms          time between the end of a batch and its answers; deadlines count as this much earlier
    slo_classes        values of the request parameter slo_class, the most urgent first; *: all others, and none
    """

    algorithm: str = "grid"
    batch_deadline_ms: float = 500.0
    batch_utility: float = 0.8
    price_window_ms: float = 3000.0
    margin_ms: float = 5.0
    slo_classes: str = "interactive,*,batch"

    def __post_init__(self) -> None:
        classes_of(self.slo_classes)
        require(self.algorithm in ALGORITHMS, "algorithm", self.algorithm, f"one of {', '.join(ALGORITHMS)}")
        for name in ("batch_deadline_ms", "batch_utility", "price_window_ms", "margin_ms"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")


@dataclass(eq=False)
class WaitingImage:
    """One image in the queue. accuracy [g]: its task's (0..1) at each gamma of the costs; NaN: it has no such gamma.

    rank: of its class, which the scheduler sets; overtaken: how many batches of later images of more urgent classes
    have gone before it.
    """

    arrival: float
    deadline: float
    utility: float
    accuracy: Floats
    _: KW_ONLY
    slo_class: str | None = None
    rank: int = 0
    overtaken: int = 0

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
        self.classes = SloClasses(classes_of(settings.slo_classes))
        self._queue: BatchQueue[ImageT] = BatchQueue(
            _WINDOW_MS, costs.max_size, settings.batch_deadline_ms, settings.batch_utility
        )
        self._initial_until = started + _INITIAL_MS
        has_baseline = settings.algorithm in _BASELINES
        self._baseline = _BASELINES[settings.algorithm](costs) if has_baseline else None
        has_price = settings.price_window_ms > 0 and not has_baseline
        self._shadow_price = ShadowPrice(settings.price_window_ms) if has_price else None

    def __len__(self) -> int:
        """Images that wait."""
        return sum(len(batch) for batch in self._queue.batches)

    def add(self, image: ImageT) -> None:
        """Queue an image that has arrived."""
        image.rank = self.classes.rank(image.slo_class)
        self.classes.waiting[image.rank] += 1
        if self._baseline is not None:
            self._baseline.add(image.arrival)
        if self._shadow_price is not None:
            self._shadow_price.add(image.arrival, image.expected_utility)
        self._queue.add(image)

    def remove(self, unwanted: Callable[[ImageT], bool]) -> list[ImageT]:
        """Remove and return the images for which `unwanted` is true."""
        removed = {image for batch in self._queue.batches for image in batch.images if unwanted(image)}
        if removed:
            remaining = [[image for image in batch.images if image not in removed] for batch in self._queue.batches]
            self._queue.batches = [Batch(images) for images in remaining if images]
            self._wait_no_longer(removed)
        return list(removed)

    def step(self, now: float) -> Step[ImageT]:
        """Evict, plan, and take the next batch out of the queue. The step has images unless the queue is empty."""
        evicted = self._evict_late(now)
        self._wait_no_longer(evicted)
        if not self._queue.batches:
            return Step((), SKIP, evicted)
        began = time.perf_counter()
        batches = sorted(self._queue.batches, key=_turn)
        times = self._allowed_times(batches)
        batch, gamma = self._first_feasible(now, batches, times, self._plan(now, batches, times))
        self._queue.batches.remove(batch)
        self._go(batch, now)
        return Step(batch.images, gamma, evicted, (time.perf_counter() - began) * 1e3)

    def _go(self, batch: Batch[ImageT], now: float) -> None:
        """Count what the images of a batch that runs from `now` on have waited, and which they overtake."""
        others = [image for other in self._queue.batches if other.rank > batch.rank for image in other.images]
        first: dict[int, float] = {}
        last = max(image.arrival for image in batch.images)
        for image in others:
            image.overtaken += image.arrival < last
            first[image.rank] = min(image.arrival, first.get(image.rank, image.arrival))
        for image in batch.images:
            passed = [rank for rank, arrival in first.items() if arrival < image.arrival]
            self.classes.start(batch.rank, (now - image.arrival) / 1e3, passed)

    def _wait_no_longer(self, images: Iterable[ImageT]) -> None:
        for image in images:
            self.classes.waiting[image.rank] -= 1

    # Planning.

    def _plan(self, now: float, batches: Sequence[Batch[ImageT]], times: Floats) -> Sequence[int]:
        """A gamma index or SKIP for each batch."""
        algorithm = self.settings.algorithm
        deadlines = self._deadlines(batches)
        few_batches = len(batches) <= _FEW_BATCHES or now < self._initial_until
        if self._baseline is not None and (few_batches or algorithm not in plan.ALGORITHMS):
            return self._plan_by_rate(self._baseline, now, batches, deadlines, times)
        problem = PlanProblem(now, deadlines, times, _expected_utilities(batches))
        if self._shadow_price is not None:
            price = self._shadow_price.at(now, self._times_per_image())
            if price:
                planned = plan.solve(problem.with_shadow_price(price), algorithm)
                if any(gamma != SKIP for gamma in planned):
                    return planned
        # No batch is worth its price, but an idle device gains nothing: plan without the price.
        return plan.solve(problem, algorithm)

    def _plan_by_rate(
        self, baseline: Baseline, now: float, batches: Sequence[Batch[ImageT]], deadlines: Floats, times: Floats
    ) -> list[int]:
        columns = [self._nearest(batch.excluded) for batch in batches]
        only = baseline.only_gamma(now)
        if only is not None:
            return [nearest[only] for nearest in columns]
        planned = baseline.plan(
            now,
            deadlines.tolist(),
            [batch_times[nearest].tolist() for batch_times, nearest in zip(times, columns, strict=True)],
            [float(np.mean([image.utility for image in batch.images])) for batch in batches],
        )
        return [nearest[gamma] for nearest, gamma in zip(columns, planned, strict=True)]

    def _first_feasible(
        self, now: float, batches: Sequence[Batch[ImageT]], times: Floats, planned: Sequence[int]
    ) -> tuple[Batch[ImageT], int]:
        """The first planned batch that meets its deadline; if there is none, the first batch at its fastest gamma."""
        for index, gamma in enumerate(planned):
            if gamma != SKIP and now + times[index, gamma] + self.settings.margin_ms < batches[index].deadline:
                return batches[index], gamma
        only = self._only_gamma(now, batches[0].excluded)
        return batches[0], int(np.argmin(times[0])) if only is None else only

    def _only_gamma(self, now: float, excluded: frozenset[int]) -> int | None:
        """The gamma that all such batches run at, if the baseline has one."""
        gamma = None if self._baseline is None else self._baseline.only_gamma(now)
        return None if gamma is None else self._nearest(excluded)[gamma]

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
        allowed = self.costs.memory(counts) < self.costs.memory_mb
        for row, batch in zip(allowed, batches, strict=True):
            row[list(batch.excluded)] = False
        times: Floats = np.where(allowed, self.costs.times(counts), np.inf)
        return times

    def _times_per_image(self) -> Floats:
        """[g] device ms of one image in a full batch."""
        size = self.costs.max_size
        times: Floats = self.costs.times([size])[0] / size
        return times

    # Eviction.

    def _evict_late(self, now: float) -> list[ImageT]:
        """Move images that their batch would make late to smaller batches; evict those that are late even alone."""
        remaining: list[Batch[ImageT]] = []
        evicted: list[ImageT] = []
        full_batch_ends: dict[frozenset[int], float] = {}
        for batch in self._queue.batches:
            excluded = batch.excluded
            if excluded not in full_batch_ends:
                full_batch_ends[excluded] = self._earliest_answer(now, self.costs.max_size, excluded)
            answer = full_batch_ends[excluded]
            if answer >= batch.deadline:
                answer = self._earliest_answer(now, len(batch), excluded)
            if answer < batch.deadline:
                remaining.append(batch)
                continue
            urgent = sorted((image for image in batch.images if image.deadline <= answer), key=lambda i: i.deadline)
            patient = [image for image in batch.images if image.deadline > answer]
            late = [image for image in urgent if image.deadline <= self._earliest_answer(now, 1, excluded)]
            evicted += late
            remaining += self._small_batches(now, urgent[len(late) :])
            if patient:
                remaining.append(Batch(patient))
        self._queue.batches = remaining
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
        gamma = self._only_gamma(now, excluded)
        took = self.costs.min_time(count, excluded) if gamma is None else float(self.costs.times([count])[0, gamma])
        return now + took + self.settings.margin_ms


class Timetable:
    """When the device is free, and when its next batch is chosen: least_ms to most_ms before the running one ends."""

    def __init__(self, least_ms: float = 1.0, most_ms: float = 20.0) -> None:
        # Predicted times of the batches in flight, and the predicted end of the last one.
        self._in_flight: deque[float] = deque()
        self._free_at = 0.0
        self._least_ms, self._most_ms = least_ms, most_ms
        self._lead_ms = min(least_ms, most_ms)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    def free_from(self, now: float) -> float:
        """When a batch that is chosen now will start."""
        return now if self.is_idle else max(now, self._free_at)

    def decision_ms(self, now: float) -> float | None:
        """The time until the next batch is chosen if images wait; None: after the end of a batch only."""
        if self.is_idle:
            return 0.0
        if len(self._in_flight) > 1 or now >= self._free_at:
            return None
        return max(0.0, self._free_at - self._lead_ms - now)

    def decided(self, took_ms: float) -> None:
        """Follow the time that decisions take."""
        target = 2 * took_ms + self._least_ms
        self._lead_ms = min(self._lead_ms + _LEAD_SMOOTHING * (target - self._lead_ms), self._most_ms)

    def add(self, start: float, predicted_ms: float) -> None:
        """A batch that is in flight from now on."""
        self._in_flight.append(predicted_ms)
        self._free_at = start + predicted_ms

    def end(self, ended: float) -> None:
        """The first batch in flight has ended."""
        self._in_flight.popleft()
        self._free_at = ended + sum(self._in_flight)


def _turn(batch: Batch[ImageT]) -> tuple[int, float]:
    """By class, in a class by deadline; a batch with an image that was overtaken too often goes before all others."""
    due = batch.rank and max(image.overtaken for image in batch.images) >= OVERTAKEN
    return -1 if due else batch.rank, batch.deadline


def _expected_utilities(batches: Sequence[Batch[ImageT]]) -> Floats:
    """[b, g]: expected utility of the images of each batch at each gamma."""
    utilities = np.array([image.expected_utility for batch in batches for image in batch.images])
    starts = np.cumsum([0, *(len(batch) for batch in batches[:-1])])
    sums: Floats = np.add.reduceat(utilities, starts, axis=0)
    return sums
