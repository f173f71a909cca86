"""One client request: the task it is for, its images, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.serving.front import Trace
from shapeshift.token_adapt.policy.image_scheduler import WaitingImage

Pixels = NDArray[np.uint8]
Values = NDArray[np.float32]
"""Of an image: the probabilities of its task's labels, or its vector."""
EMBEDDING = "embedding"
"""The task of requests for vectors, which every model has that computes; its accuracy is the cosine to gamma 0."""

IN_TIME, LATE, EVICTED = "in_time", "late", "evicted"
OUTCOMES = (IN_TIME, LATE, EVICTED)


def now_ms() -> float:
    """The clock of arrivals and deadlines."""
    return time.monotonic() * 1e3


@dataclass(frozen=True)
class Task:
    """One version of a task: labels, accuracy (0..1) by gamma, and the defaults of its requests.

    Its images are computed at the gammas of `accuracy` only. A request holds the version that it was admitted with
    until it is answered. is_default: requests that name no task mean this one, unless config.pbtxt names another.
    sha256: of its files; empty without any. parts: what `ImageModel.run` computes it with. embedding_size: numbers of a
    vector, of EMBEDDING, which has no labels.
    """

    name: str
    labels: tuple[str, ...]
    accuracy: Mapping[int, float]
    latency_ms: float
    utility: float
    is_default: bool = False
    sha256: str = ""
    parts: Any = field(default=None, repr=False, compare=False)
    embedding_size: int = 0


@dataclass(frozen=True)
class ImageRequestOptions:
    """Task of a request, its latency requirement, the utility of an answer in time, and its class."""

    task: Task
    latency_ms: float
    utility: float
    slo_class: str | None = None


class ImageRequest:
    """Collects the results of its images; `on_finished` is called once, when all images are settled.

    If the request failed as a whole, `error` is set before that call. utility: what its images that ran gain if it ends
    in time; compute_ms: of the longest of their batches. One thread at a time changes a request: the
    decoding thread, then the executor. Any thread may set `cancelled`.
    """

    def __init__(
        self, options: ImageRequestOptions, num_images: int, on_finished: Callable[[ImageRequest], None]
    ) -> None:
        self.options = options
        self.num_images = num_images
        self.arrival = now_ms()
        self.deadline = self.arrival + options.latency_ms
        self.error: Exception | None = None
        self.trace: Trace | None = None
        self.cancelled = False
        self.utility = 0.0
        self.compute_ms = 0.0
        self.labels: list[bytes] = [b""] * num_images
        width = options.task.embedding_size or len(options.task.labels)
        self.values = np.zeros((num_images, width), np.float32)
        self.gammas = np.zeros((num_images, 1), np.int32)
        self.batch_sizes = np.zeros((num_images, 1), np.int32)
        self.outcomes = [EVICTED] * num_images
        self._on_finished = on_finished
        self._unsettled = num_images

    @property
    def arrived(self) -> float:
        """As `arrival`, in seconds."""
        return self.arrival / 1e3

    @property
    def is_finished(self) -> bool:
        """Whether `on_finished` was called."""
        return self._unsettled == 0

    def waiting_images(self, pixels: Sequence[Pixels], gammas: Sequence[int]) -> list[RequestImage]:
        """Its images for the scheduler, with the task's accuracy at each of `gammas`, NaN where it has none."""
        task, utility, slo_class = self.options.task, self.options.utility, self.options.slo_class
        accuracy = np.array([task.accuracy.get(gamma, np.nan) for gamma in gammas])
        return [
            RequestImage(self.arrival, self.deadline, utility, accuracy, self, index, image_pixels, slo_class=slo_class)
            for index, image_pixels in enumerate(pixels)
        ]

    def record_result(self, index: int, values: Values, gamma: int, batch_size: int, ended_ms: float) -> None:
        """Settle image `index`, which ran."""
        self.values[index] = values
        if labels := self.options.task.labels:
            self.labels[index] = labels[int(np.argmax(values))].encode()
        self.gammas[index], self.batch_sizes[index] = gamma, batch_size
        self.outcomes[index] = IN_TIME if ended_ms < self.deadline else LATE
        self._settle(1)

    def trace_batch(self, gamma: int, images: int, predicted_ms: float, took_ms: float, ended_ms: float) -> None:
        """Add a batch that ran with images of this request to its trace, if it has one."""
        if self.trace is None:
            return
        began_ms = ended_ms - took_ms
        facts = {"gamma": gamma, "images": images, "predicted_ms": predicted_ms}
        facts |= {"waited_ms": began_ms - self.arrival, "slack_ms": self.deadline - ended_ms}
        self.trace.span("batch", began_ms / 1e3, ended_ms / 1e3, facts)

    def record_evictions(self, count: int) -> None:
        """Settle images that will not run, because they cannot meet their deadline."""
        self._settle(count)

    def fail(self, error: Exception) -> None:
        """Finish the whole request with `error`; no effect on a finished one."""
        if not self.is_finished:
            self.error = error
            self._unsettled = 0
            self._on_finished(self)

    def _settle(self, count: int) -> None:
        if not self.is_finished:
            self._unsettled -= count
            if self._unsettled == 0:
                self._on_finished(self)


@dataclass(eq=False)
class RequestImage(WaitingImage):
    """Image `index` of a request, decoded."""

    request: ImageRequest
    index: int
    pixels: Pixels


def output_values(request: ImageRequest) -> dict[str, Any]:
    """The outputs of a finished request by name, each [images, ...]: those that its task has."""
    named = {"LABEL": np.array(request.labels, dtype=object).reshape(-1, 1), "PROBABILITIES": request.values}
    return {
        **({"EMBEDDING": request.values} if request.options.task.embedding_size else named),
        "GAMMA": request.gammas,
        "BATCH_SIZE": request.batch_sizes,
        "OUTCOME": np.array([outcome.encode() for outcome in request.outcomes], dtype=object).reshape(-1, 1),
    }
