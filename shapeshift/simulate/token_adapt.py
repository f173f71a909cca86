"""The images of one device as discrete events, under the scheduler that serves (OTAS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shapeshift.simulate.events import Events, Progress
from shapeshift.token_adapt.policy.costs import Costs
from shapeshift.token_adapt.policy.image_scheduler import ImageScheduler, SchedulerSettings, WaitingImage
from shapeshift.workloads.trace import Trace

Floats = NDArray[np.float64]

IN_TIME, LATE, EVICTED = 0, 1, 2
OUTCOMES = ("in time", "late", "evicted")


@dataclass
class SimulationResult:
    """By image: outcome, gamma index (-1: never run) and answer time, ms. batch_sizes: images of each batch."""

    outcome: NDArray[np.int8]
    gamma: NDArray[np.int16]
    done_ms: Floats
    batch_sizes: list[int] = field(default_factory=list)

    def total_utility(self, trace: Trace, accuracy: Floats) -> float:
        """Expected utility: the sum of utility times accuracy [n, gammas] over the images in time."""
        in_time = np.flatnonzero(self.outcome == IN_TIME)
        return float((trace.utility[in_time] * accuracy[in_time, self.gamma[in_time]]).sum())


@dataclass(eq=False)
class _Image(WaitingImage):
    index: int


def run(
    costs: Costs,
    settings: SchedulerSettings,
    trace: Trace,
    accuracy: Floats,
    noise: Callable[[], float] = lambda: 1.0,
    progress: Progress | None = None,
    switch_ms: Sequence[float] = (),
) -> SimulationResult:
    """Serve images on one device; planning takes no time, and a batch that of `costs` times `noise()`.

    accuracy: of each image at each gamma of `costs`; switch_ms: of each gamma, how much longer a batch takes that
    follows another gamma. The trace has a latency requirement for each.
    """
    return _Device(costs, settings, trace, accuracy, noise, switch_ms or [0.0] * len(costs.gammas)).run(progress)


class _Device:
    """Runs one batch at a time; the next one is chosen when it has ended, or when an image comes while it is idle."""

    def __init__(
        self,
        costs: Costs,
        settings: SchedulerSettings,
        trace: Trace,
        accuracy: Floats,
        noise: Callable[[], float],
        switch_ms: Sequence[float],
    ) -> None:
        self._at_s, self._accuracy, self._noise = trace.at_s, accuracy, noise
        self._switch_ms, self._gamma = switch_ms, -1
        self._latency_ms, self._utility = trace.latency_ms.tolist(), trace.utility.tolist()
        self._events = Events()
        self._scheduler: ImageScheduler[_Image] = ImageScheduler(costs, settings, 0.0)
        # Before anything is measured.
        self._true_ms = costs.times(list(range(costs.max_size + 1)))
        self._is_idle = True
        count = len(trace)
        self._result = SimulationResult(np.full(count, EVICTED, np.int8), np.full(count, -1, np.int16), np.zeros(count))

    def run(self, progress: Progress | None) -> SimulationResult:
        self._events.run(self._at_s, self._arrive, progress)
        return self._result

    def _arrive(self, index: int) -> None:
        now_ms = self._events.now * 1e3
        deadline = now_ms + self._latency_ms[index]
        self._scheduler.add(_Image(now_ms, deadline, self._utility[index], self._accuracy[index], index))
        if self._is_idle:
            self._is_idle = False
            self._events.at(self._events.now, self._step)

    def _step(self, _: None) -> None:
        now_ms = self._events.now * 1e3
        step = self._scheduler.step(now_ms)
        for image in step.evicted:
            self._result.done_ms[image.index] = now_ms
        self._is_idle = not step.images
        if step.images:
            took_ms = float(self._true_ms[len(step.images), step.gamma]) * self._noise()
            took_ms += self._switch_ms[step.gamma] if step.gamma != self._gamma else 0.0
            self._gamma = step.gamma
            self._scheduler.costs.observe(step.gamma, len(step.images), took_ms)
            self._result.batch_sizes.append(len(step.images))
            self._events.at((now_ms + took_ms) / 1e3, self._end, (step.images, step.gamma))

    def _end(self, batch: tuple[Sequence[_Image], int]) -> None:
        images, gamma = batch
        now_ms = self._events.now * 1e3
        for image in images:
            self._result.outcome[image.index] = IN_TIME if now_ms < image.deadline else LATE
            self._result.gamma[image.index] = gamma
            self._result.done_ms[image.index] = now_ms
        self._step(None)
