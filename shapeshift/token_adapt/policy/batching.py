"""Algorithm 1 of OTAS: images with similar arrival, deadline and utility share a batch. Times in ms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Batchable(Protocol):
    """What Algorithm 1 reads of an image: s_r, d_r and u_r.

    excluded: gammas, by index, that its task does not have; rank: of its class.
    """

    arrival: float
    deadline: float
    utility: float
    excluded: frozenset[int]
    rank: int


ImageT = TypeVar("ImageT", bound=Batchable)


class Batch(Generic[ImageT]):
    """At least one image, all with the same gammas and of one class. Arrival and deadline are the earliest of the
    images, the utility is that of the first.
    """

    def __init__(self, images: Sequence[ImageT]) -> None:
        self.images = list(images)
        self.arrival = min(image.arrival for image in images)
        self.deadline = min(image.deadline for image in images)
        self.utility = images[0].utility
        self.excluded, self.rank = images[0].excluded, images[0].rank

    def __len__(self) -> int:
        return len(self.images)

    def add(self, image: ImageT) -> None:
        self.images.append(image)
        self.arrival = min(self.arrival, image.arrival)
        self.deadline = min(self.deadline, image.deadline)


class BatchQueue(Generic[ImageT]):
    """The waiting batches, in order of creation. Its limits are the paper's delta, epsilon, eta and mu.

    window_ms         a batch accepts images that arrive up to this long after its first one
    max_size          most images in a batch
    deadline_gap_ms   largest difference between the deadline of an image and that of its batch
    utility_gap       largest difference between the utility of an image and that of the first one in its batch
    """

    def __init__(self, window_ms: float, max_size: int, deadline_gap_ms: float, utility_gap: float) -> None:
        self.batches: list[Batch[ImageT]] = []
        self._window_ms = window_ms
        self._max_size = max_size
        self._deadline_gap_ms = deadline_gap_ms
        self._utility_gap = utility_gap

    def add(self, image: ImageT) -> None:
        """Add an image to the newest batch that accepts it, or start a new batch."""
        for batch in reversed(self.batches):
            if batch.arrival + self._window_ms < image.arrival:
                break
            if self._accepts(batch, image):
                batch.add(image)
                return
        self.batches.append(Batch([image]))

    def _accepts(self, batch: Batch[ImageT], image: ImageT) -> bool:
        """Lines 4 to 9: whether size, deadline and utility are within their limits, which are inclusive.

        An image of other gammas is not accepted: a batch is one call of the engine of its gamma. Nor is one of another
        class, which has another turn.
        """
        return (
            len(batch) < self._max_size
            and abs(batch.deadline - image.deadline) <= self._deadline_gap_ms
            and abs(batch.utility - image.utility) <= self._utility_gap
            and (batch.excluded, batch.rank) == (image.excluded, image.rank)
        )
