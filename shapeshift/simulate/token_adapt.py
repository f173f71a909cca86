"""Discrete-event simulation of one device under the scheduler that serves (OTAS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shapeshift.token_adapt.policy.costs import Costs
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler, SchedulerSettings, WaitingImage

Floats = NDArray[np.float64]

IN_TIME, LATE, EVICTED = 0, 1, 2


@dataclass(frozen=True)
class Load:
    """Arrival times in ascending order [n], and by image its latency requirement, utility and accuracy [n, gammas]."""

    at_ms: Floats
    latency_ms: Floats
    utility: Floats
    accuracy: Floats


@dataclass
class SimulationResult:
    """By image: outcome, gamma index (-1: never run) and answer time, ms.

    `batches` has (start, gamma index, size, planning ms) of each batch.
    """

    outcome: NDArray[np.int8]
    gamma: NDArray[np.int16]
    done_ms: Floats
    batches: list[tuple[float, int, int, float]] = field(default_factory=list)

    def total_utility(self, load: Load) -> float:
        """Expected utility: the sum of utility times accuracy over the images in time."""
        in_time = np.flatnonzero(self.outcome == IN_TIME)
        return float((load.utility[in_time] * load.accuracy[in_time, self.gamma[in_time]]).sum())


@dataclass(eq=False)
class _Image(WaitingImage):
    index: int


def run(
    costs: Costs,
    settings: SchedulerSettings,
    load: Load,
    noise: Callable[[], float] = lambda: 1.0,
) -> SimulationResult:
    """Serve `load` on one device; planning takes no time.

    A batch takes the time of `costs` times `noise()`.
    """
    count = len(load.at_ms)
    result = SimulationResult(np.full(count, EVICTED, np.int8), np.full(count, -1, np.int16), np.zeros(count))
    scheduler: ImageScheduler[_Image] = ImageScheduler(costs, settings, 0.0)
    true_ms = costs.times(list(range(costs.max_size + 1)))
    clock, num_arrived = 0.0, 0
    while num_arrived < count or len(scheduler):
        if not len(scheduler):
            clock = max(clock, float(load.at_ms[num_arrived]))
        while num_arrived < count and load.at_ms[num_arrived] <= clock:
            scheduler.add(_image(load, num_arrived))
            num_arrived += 1
        step = scheduler.step(clock)
        for image in step.evicted:
            result.done_ms[image.index] = clock
        if not step.images:
            continue
        took_ms = float(true_ms[len(step.images), step.gamma]) * noise()
        scheduler.costs.observe(step.gamma, len(step.images), took_ms)
        result.batches.append((clock, step.gamma, len(step.images), step.plan_ms))
        clock += took_ms
        _record(result, step.images, step.gamma, clock)
    return result


def _image(load: Load, index: int) -> _Image:
    arrival = float(load.at_ms[index])
    deadline = arrival + float(load.latency_ms[index])
    return _Image(arrival, deadline, float(load.utility[index]), load.accuracy[index], index)


def _record(result: SimulationResult, images: Sequence[_Image], gamma: int, clock: float) -> None:
    for image in images:
        result.outcome[image.index] = IN_TIME if clock < image.deadline else LATE
        result.gamma[image.index] = gamma
        result.done_ms[image.index] = clock
