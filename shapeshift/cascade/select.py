"""Which candidate serves a task (Tabi, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A candidate whose 75th percentile is beyond this multiple of its slowest model is impractical.
TAIL = 1.5


@dataclass(frozen=True)
class Measured:
    """A candidate as it was profiled: accuracy 0 to 1; mean latency, 75th percentile and those of its models in ms."""

    name: str
    accuracy: float
    latency: float
    p75: float
    model_latencies: tuple[float, ...]

    @property
    def practical(self) -> bool:
        return self.p75 <= TAIL * max(self.model_latencies)


def select(candidates: Sequence[Measured], min_accuracy: float, max_latency: float) -> Measured | None:
    """The fastest practical candidate that meets both targets; of equally fast ones the more accurate, then by name."""
    meeting = [
        one for one in candidates if one.practical and one.accuracy >= min_accuracy and one.latency <= max_latency
    ]
    return min(meeting, key=lambda one: (one.latency, -one.accuracy, one.name), default=None)


def nearest(candidates: Sequence[Measured], min_accuracy: float, max_latency: float) -> Measured | None:
    """What to offer where none meets both targets: the most accurate practical one that is fast enough, else the
    fastest of those that are accurate enough, else the most accurate of all."""
    practical = [one for one in candidates if one.practical]
    fast = [one for one in practical if one.latency <= max_latency]
    accurate = [one for one in practical if one.accuracy >= min_accuracy]
    if fast:
        return max(fast, key=lambda one: (one.accuracy, -one.latency, one.name))
    if accurate:
        return min(accurate, key=lambda one: (one.latency, -one.accuracy, one.name))
    return max(practical, key=lambda one: (one.accuracy, -one.latency, one.name), default=None)
