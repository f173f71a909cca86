"""The interface between serving and the model: the profile of a gamma, a task, and the model itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Probabilities = NDArray[np.float32]


@dataclass(frozen=True)
class Preprocessing:
    """How an image of any size becomes the square input of a model: resized, then its centre cut out.

    size      edge of the square, pixels
    edge      which edge of the image gets `resized` pixels: shortest, longest, or both (which ignores its proportions)
    resized   pixels; 0: `size`
    filter    Pillow's name of the interpolation, in lower case
    rounding  of an odd margin around the centre: even (torchvision, timm) or down (transformers)
    border    RGB colour around an image that is smaller than the square
    on_white  transparent parts show white; False: the colours below them
    """

    size: int
    edge: str = "shortest"
    resized: int = 0
    filter: str = "bicubic"
    rounding: str = "even"
    border: tuple[int, int, int] = (0, 0, 0)
    on_white: bool = False


@dataclass(frozen=True)
class GammaProfile:
    """Measured costs of one gamma: tokens after the last block, latency [ms] by batch size, MB per image."""

    gamma: int
    tokens: int
    latency_ms: Mapping[int, float]
    memory_mb: float


@dataclass(frozen=True)
class Task:
    """One version of a task: labels, accuracy (0..1) by gamma, and the defaults of its requests.

    Its images are computed at the gammas of `accuracy` only. A request holds the version that it was admitted with
    until it is answered. is_default: requests that name no task mean this one, unless config.pbtxt names another.
    sha256: of its files; empty without any. parts: what `ImageModel.run` computes it with.
    """

    name: str
    labels: tuple[str, ...]
    accuracy: Mapping[int, float]
    latency_ms: float
    utility: float
    is_default: bool = False
    sha256: str = ""
    parts: Any = field(default=None, repr=False, compare=False)


class ImageModel(Protocol):
    """A vision transformer that can add tokens (gamma > 0) or merge them (gamma < 0).

    One thread calls `run` and `reload_tasks`. `tasks` is only replaced as a whole, so any thread can read it.
    """

    @property
    def preprocessing(self) -> Preprocessing: ...

    @property
    def gammas(self) -> tuple[int, ...]:
        """Ascending; 0 is one of them."""
        ...

    @property
    def profiles(self) -> Mapping[int, GammaProfile]: ...

    @property
    def tasks(self) -> Mapping[str, Task]: ...

    def run(self, gamma: int, pixels: Pixels, tasks: Sequence[Task]) -> Sequence[Probabilities]:
        """Class probabilities: n arrays, one value per label of the image's task.

        pixels [n, size, size, 3], as `preprocessing` makes them; tasks [n], of this model, served still or not. n can
        exceed the largest profiled batch.
        """
        ...

    def reload_tasks(self) -> list[str]:
        """Update `tasks` from the task registry; returns one message per refused entry."""
        ...
