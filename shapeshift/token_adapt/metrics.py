"""Metrics of the executor and the model runner; the front exports them."""

from __future__ import annotations

from collections.abc import Sequence

from shapeshift.serving.metrics import Counter, Histogram
from shapeshift.token_adapt.request import OUTCOMES

_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
_PLAN_MS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50)


class ImageMetrics:
    """Written by the executor's thread only, except `refused_tasks`, which the model runner writes."""

    def __init__(self, gammas: Sequence[int]) -> None:
        self.outcomes = {
            outcome: Counter("images_total", "Settled images, by outcome", {"outcome": outcome}) for outcome in OUTCOMES
        }
        self.by_gamma = {
            gamma: Counter("gamma_images_total", "Images run, by gamma", {"gamma": str(gamma)}) for gamma in gammas
        }
        self.batch_images = Histogram("batch_images", "Batches run, by number of images", _BATCH_SIZES)
        self.plan_ms = Histogram("plan_ms", "Plans made, by planning time", _PLAN_MS)
        self.utility = Counter(
            "utility_total", "Utility of images of requests in time, times the accuracy of their gamma"
        )
        self.refused_tasks = Counter("tasks_refused_total", "Refused entries of the task registry")

    @property
    def exported(self) -> list[Counter | Histogram]:
        counters = [*self.outcomes.values(), *self.by_gamma.values(), self.utility, self.refused_tasks]
        return [*counters, self.batch_images, self.plan_ms]

    def record_batch(self, gamma: int, outcomes: Sequence[str], plan_ms: float) -> None:
        """Count a batch that ran; `outcomes` has one entry per image."""
        for outcome in outcomes:
            self.outcomes[outcome].add()
        self.by_gamma[gamma].add(len(outcomes))
        self.batch_images.observe(len(outcomes))
        self.plan_ms.observe(plan_ms)
