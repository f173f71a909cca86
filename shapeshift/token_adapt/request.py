"""One client's request on its way: its images, and what became of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shapeshift.errors import OverloadedError
from shapeshift.token_adapt.adapter import Query
from shapeshift.token_adapt.interfaces import Pixels, Probabilities, Task

IN_TIME, LATE, EVICTED = "in_time", "late", "evicted"
OUTCOMES = (IN_TIME, LATE, EVICTED)


def now_ms() -> float:
    """The clock of arrivals and deadlines."""
    return time.monotonic() * 1e3


@dataclass(frozen=True)
class Wish:
    """What a request asks for: its task, its latency requirement and what an answer in time is worth."""

    task: Task
    latency_ms: float
    utility: float


class ImageRequest:
    """Collects what became of its images; `finished` is called once, when all are settled.

    `error` is set by then where the request failed as a whole. Whoever holds the request changes it: the thread that
    decodes, then the one that executes; `cancelled` is set by any.
    """

    def __init__(self, wish: Wish, images: int, finished: Callable[[ImageRequest], None]) -> None:
        self.wish = wish
        self.images = images
        self.arrived = now_ms()
        self.deadline = self.arrived + wish.latency_ms
        self.error: Exception | None = None
        self.cancelled = False
        classes = len(wish.task.labels)
        self.labels: list[bytes] = [b""] * images
        self.probabilities = np.zeros((images, classes), np.float32)
        self.gammas = np.zeros((images, 1), np.int32)
        self.batch_sizes = np.zeros((images, 1), np.int32)
        self.outcomes = [EVICTED] * images
        self._finished = finished
        self._open = images

    @property
    def ended(self) -> bool:
        """Whether `finished` was called."""
        return self._open == 0

    def queries(self, pixels: Sequence[Pixels], gammas: Sequence[int]) -> list[Query]:
        """Its images as the adapter takes them; accuracies at these gammas."""
        task, utility = self.wish.task, self.wish.utility
        accuracy = np.array([task.accuracy.get(gamma, 0.0) for gamma in gammas])
        return [
            Query(self.arrived, self.deadline, utility, accuracy, Waiting(self, index, square))
            for index, square in enumerate(pixels)
        ]

    def computed(self, index: int, probabilities: Probabilities, gamma: int, batch_size: int, done_ms: float) -> None:
        """Image `index` has run; where its task has other labels by now, the request fails."""
        if len(probabilities) != len(self.wish.task.labels):
            self.fail(OverloadedError(f"task {self.wish.task.name} was changed while the request waited; retry"))
            return
        self.probabilities[index] = probabilities
        self.labels[index] = self.wish.task.labels[int(np.argmax(probabilities))].encode()
        self.gammas[index], self.batch_sizes[index] = gamma, batch_size
        self.outcomes[index] = IN_TIME if done_ms < self.deadline else LATE
        self._settle()

    def evicted(self) -> None:
        """One of its images will not run: it cannot make its deadline."""
        self._settle()

    def fail(self, error: Exception) -> None:
        """End the request as a whole with `error`; nothing happens where it has ended."""
        if not self.ended:
            self.error = error
            self._open = 0
            self._finished(self)

    def _settle(self) -> None:
        if not self.ended:
            self._open -= 1
            if self._open == 0:
                self._finished(self)


@dataclass(frozen=True)
class Waiting:
    """One image of a request, ready to run."""

    request: ImageRequest
    index: int
    pixels: Pixels


def tensors(request: ImageRequest) -> dict[str, Any]:
    """The outputs of a request whose images are all settled, by name, each [images, ...]."""
    return {
        "LABEL": np.array(request.labels, dtype=object).reshape(-1, 1),
        "PROBABILITIES": request.probabilities,
        "GAMMA": request.gammas,
        "BATCH_SIZE": request.batch_sizes,
        "OUTCOME": np.array([outcome.encode() for outcome in request.outcomes], dtype=object).reshape(-1, 1),
    }
