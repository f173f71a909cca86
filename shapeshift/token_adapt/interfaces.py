"""The line between serving and the model: what a gamma costs, what a task is, and what computes a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
TaskIndices = NDArray[np.int32]
Probabilities = NDArray[np.float32]


@dataclass(frozen=True)
class GammaProfile:
    """One gamma as measured: tokens after the last block, median latency [ms] by batch size, MB that an image takes."""

    gamma: int
    tokens: int
    latency_ms: Mapping[int, float]
    memory_mb: float


@dataclass(frozen=True)
class Task:
    """A task as registered: labels, accuracy (0..1) by gamma, and what a request gets that states nothing itself.

    `index` is the task's place in what a model computes; it stays the task's own as long as the process lives.
    """

    name: str
    labels: tuple[str, ...]
    accuracy: Mapping[int, float]
    latency_ms: float
    utility: float
    index: int


class ImageModel(Protocol):
    """A vision transformer whose tokens can be more (gamma > 0) or fewer (gamma < 0) than its own.

    `run` and `reload_tasks` are called by one thread, one at a time. `tasks` is replaced as a whole, never changed, so
    that other threads may read it at any time.
    """

    @property
    def image_size(self) -> int: ...

    @property
    def gammas(self) -> tuple[int, ...]:
        """In rising order, 0 among them."""
        ...

    @property
    def profiles(self) -> Mapping[int, GammaProfile]: ...

    @property
    def tasks(self) -> Mapping[str, Task]: ...

    def run(self, gamma: int, pixels: Pixels, task_index: TaskIndices) -> Sequence[Probabilities]:
        """The class probabilities of each image; `pixels` is [n, image_size, image_size, 3], `task_index` [n].

        The result has n arrays, each as long as its task has labels. Any n is served, those beyond the largest profiled
        batch too.
        """
        ...

    def reload_tasks(self) -> list[str]:
        """Takes in what the registry of tasks now holds; one message for each entry that was refused."""
        ...
