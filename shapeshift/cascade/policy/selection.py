"""Which candidate serves a task (Tabi, section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shapeshift.errors import InvalidInputError

# A candidate with a 75th percentile above this multiple of its slowest model is impractical.
MAX_TAIL = 1.5


class Measured(Protocol):
    """A profiled candidate: its mean latency, its 75th percentile, and the mean of each model, ms.

    accuracy: as measured, 0 to 1; assured_accuracy: what a target is compared with.
    """

    @property
    def name(self) -> str: ...

    @property
    def accuracy(self) -> float: ...

    @property
    def assured_accuracy(self) -> float: ...

    @property
    def latency_ms(self) -> float: ...

    @property
    def p75_ms(self) -> float: ...

    @property
    def model_latencies(self) -> tuple[float, ...]: ...


C = TypeVar("C", bound=Measured)


@dataclass(frozen=True)
class Choice(Generic[C]):
    """selected: the fastest candidate that meets both targets, or None; nearest: the candidate to serve then."""

    selected: C | None
    nearest: C

    @property
    def serving(self) -> C:
        """The candidate to serve, whether it meets the targets or not."""
        return self.selected or self.nearest


def is_practical(candidate: Measured) -> bool:
    """Whether its 75th percentile is within MAX_TAIL times its slowest model."""
    return candidate.p75_ms <= MAX_TAIL * max(candidate.model_latencies)


def select(candidates: Sequence[C], min_accuracy: float, max_latency_ms: float) -> C | None:
    """The fastest practical candidate that meets both targets; ties go to the more accurate, then by name."""
    meeting = [
        one
        for one in candidates
        if is_practical(one) and one.assured_accuracy >= min_accuracy and one.latency_ms <= max_latency_ms
    ]
    return min(meeting, key=lambda one: (one.latency_ms, -one.accuracy, one.name), default=None)


def _by_accuracy(one: Measured) -> tuple[float, float, float, str]:
    return one.assured_accuracy, one.accuracy, -one.latency_ms, one.name


def nearest(candidates: Sequence[C], min_accuracy: float, max_latency_ms: float) -> C | None:
    """The candidate to offer where none meets both targets; None where none is practical.

    The most accurate one that is fast enough, else the fastest that is accurate enough, else the most accurate.
    """
    practical = [one for one in candidates if is_practical(one)]
    fast = [one for one in practical if one.latency_ms <= max_latency_ms]
    accurate = [one for one in practical if one.assured_accuracy >= min_accuracy]
    if not fast and accurate:
        return min(accurate, key=lambda one: (one.latency_ms, -one.accuracy, one.name))
    return max(fast or practical, key=_by_accuracy, default=None)


def choose(candidates: Sequence[C], min_accuracy: float, max_latency_ms: float) -> Choice[C]:
    """The candidate for these targets (0: no target). Raises InvalidInputError where no candidate is practical."""
    limit_ms = max_latency_ms or math.inf
    fallback = nearest(candidates, min_accuracy, limit_ms)
    if fallback is None:
        allowed = f"at least one whose 75th percentile is within {MAX_TAIL} times its slowest model"
        raise InvalidInputError("candidates", len(candidates), allowed)
    return Choice(select(candidates, min_accuracy, limit_ms), fallback)
