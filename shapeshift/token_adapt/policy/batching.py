"""Algorithm 1 of OTAS: images with similar arrival, deadline and utility share a batch. Times in ms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Batchable(Protocol):
    """What Algorithm 1 reads of an image: s_r, d_r and u_r; and the gammas, by index, that its task does not have."""

    @property
    def arrival(self) -> float: ...

    @property
    def deadline(self) -> float: ...

    @property
    def utility(self) -> float: ...

    @property
    def excluded(self) -> frozenset[int]: ...


ImageT = TypeVar("ImageT", bound=Batchable)


@dataclass(frozen=True)
class BatchSettings:
    """The paper's delta, epsilon, eta and mu, with its values.

    window_ms         a batch accepts images that arrive up to this long after its first one
    max_size          most images in a batch
    deadline_gap_ms   largest difference between the deadline of an image and that of its batch
    utility_gap       largest difference between the utility of an image and that of the first one in its batch
    """

    window_ms: float = 500.0
    max_size: int = 64
    deadline_gap_ms: float = 500.0
    utility_gap: float = 0.8


class Batch(Generic[ImageT]):
    """At least one image, all with the same gammas. Arrival and deadline are the earliest of the images, the utility is
    that of the first.
    """

    def __init__(self, images: Sequence[ImageT]) -> None:
        self.images = list(images)
        self.arrival = min(image.arrival for image in images)
        self.deadline = min(image.deadline for image in images)
        self.utility = images[0].utility
        self.excluded = images[0].excluded

    def __len__(self) -> int:
        return len(self.images)

    def add(self, image: ImageT) -> None:
        self.images.append(image)
        self.arrival = min(self.arrival, image.arrival)
        self.deadline = min(self.deadline, image.deadline)

    def accepts(self, image: ImageT, settings: BatchSettings) -> bool:
        """Lines 4 to 9: whether size, deadline and utility are within their limits, which are inclusive.

        An image of other gammas is not accepted: a batch is one call of the engine of its gamma.
        """
        return (
            len(self.images) < settings.max_size
            and abs(self.deadline - image.deadline) <= settings.deadline_gap_ms
            and abs(self.utility - image.utility) <= settings.utility_gap
            and self.excluded == image.excluded
        )


class BatchQueue(Generic[ImageT]):
    """The waiting batches, in order of creation."""

    def __init__(self, settings: BatchSettings) -> None:
        self.settings = settings
        self.batches: list[Batch[ImageT]] = []

    def add(self, image: ImageT) -> None:
        """Add an image to the newest batch that accepts it, or start a new batch."""
        for batch in reversed(self.batches):
            if batch.arrival + self.settings.window_ms < image.arrival:
                break
            if batch.accepts(image, self.settings):
                batch.add(image)
                return
        self.batches.append(Batch([image]))
