"""The bounds of queues, the one form of their refusals, and who goes first among those that wait.

A refusal names parameter, value, limit, and what to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shapeshift.errors import OverloadedError
from shapeshift.serving.metrics import Counter
from shapeshift.settings import require

# Of the newest answer in a mean of answers.
_SMOOTHING = 1 / 32
# Before the first answers, as measured under load: a queue fills before any of them comes.
_FIRST_DEVIATION = 0.03
_MAX_LATENESS = 4.0


@dataclass(frozen=True)
class Bound:
    """The most `unit` that may wait or run, set by the parameter `parameter`."""

    parameter: str
    limit: int
    unit: str
    state: str = "wait"

    def require(self, held: int, added: int = 1) -> None:
        """Raise OverloadedError where `added` more do not fit beside the `held` ones."""
        if held + added > self.limit:
            state = f"{held} {self.unit} {self.state}, {added} more would exceed {self.limit}"
            raise OverloadedError(f"{self.parameter}: {state}; retry later")

    def require_unless_empty(self, held: int, added: int) -> None:
        """As `require`, but where none are held any number fits: no limit makes a request impossible."""
        if held:
            self.require(held, added)


def require_deadline(predicted_ms: float, latency_ms: float | None) -> None:
    """Raise OverloadedError where an answer after `predicted_ms` is too late for the request's `latency_ms`."""
    if latency_ms is not None and predicted_ms > latency_ms:
        reason = f"got {latency_ms:g}, an answer is predicted after {predicted_ms:.0f} ms"
        raise OverloadedError(f"latency_ms: {reason}; retry later or elsewhere")


class TimeBound:
    """The longest time until an answer, as the setting `parameter` says; limit_ms 0: any.

    Answers come later than predicted, by how much differs with the load. So a prediction is held against the limit as
    late as hardly any recent one came true: times the smoothed ratio of taken to predicted time, plus four mean
    deviations of it. That is how RFC 6298 (section 2) bounds a round trip. Only predictions that came near the limit
    count: a short wait is off by more, and never refused.
    """

    def __init__(self, parameter: str, limit_ms: float) -> None:
        self._parameter = parameter
        self._limit_ms = limit_ms
        self._ratio, self._deviation = 1.0, _FIRST_DEVIATION

    def require(self, predicted_ms: float, latency_ms: float | None = None) -> None:
        """Raise OverloadedError where an answer that is predicted after `predicted_ms` may come beyond the limit.

        Or where it is too late for the request's `latency_ms`, which is held against the prediction as it is.
        """
        require_deadline(predicted_ms, latency_ms)
        latest_ms = predicted_ms * self._lateness
        if self._limit_ms and latest_ms > self._limit_ms:
            reason = f"an answer is predicted after {latest_ms:.0f} ms, the limit is {self._limit_ms:g} ms"
            raise OverloadedError(f"{self._parameter}: {reason}; retry later")

    def observe(self, predicted_ms: float, took_ms: float) -> None:
        """Record how long an answer took that was predicted after `predicted_ms`."""
        # Held against what is admitted now: else a time of great lateness would admit nothing that could end it.
        if predicted_ms * self._lateness < self._limit_ms / 2 or not self._limit_ms:
            return
        error = min(took_ms / predicted_ms, _MAX_LATENESS) - self._ratio
        self._deviation += _SMOOTHING * (abs(error) - self._deviation)
        self._ratio += _SMOOTHING * error

    @property
    def _lateness(self) -> float:
        return min(max(self._ratio + 4 * self._deviation, 1.0), _MAX_LATENESS)


def unloading() -> OverloadedError:
    """The error for a request that comes, or still waits, while its model is being unloaded."""
    return OverloadedError("the model is being unloaded; retry elsewhere")


class QueuedRequest(Protocol):
    """A request whose `slo_class` is a name or None."""

    @property
    def slo_class(self) -> str | None: ...


OTHERS = "*"
"""Stands in a list of classes for all that it does not name."""
OVERTAKEN = 32
"""Most later requests that go before a waiting one because their class is more urgent."""


C = TypeVar("C", bound=QueuedRequest)


def classes_of(slo_classes: str) -> list[str]:
    """The names in the setting `slo_classes`, the most urgent one first. Raises InvalidInputError."""
    names = [name.strip() for name in slo_classes.split(",")]
    require(names.count(OTHERS) == 1, "slo_classes", slo_classes, "names with commas, one of them *")
    require(len({*names}) == len(names), "slo_classes", slo_classes, "each name once")
    return names


def next_in_order(ranks: Sequence[int], overtaken: Sequence[int], count: int, most: int) -> list[int]:
    """The places of the next `count` requests, in their order.

    ranks      the class of each waiting request in order of arrival, 0 for the most urgent one
    overtaken  how many later requests have gone before it so far
    most       no request is overtaken more often: one that has been goes first

    Otherwise the most urgent request goes first, and of these the one that came first.
    """
    counts, left = list(overtaken), list(range(len(ranks)))
    chosen: list[int] = []
    while left and len(chosen) < count:
        due = [place for place in left if counts[place] >= most]
        place = due[0] if due else min(left, key=lambda one: (ranks[one], one))
        left.remove(place)
        chosen.append(place)
        for earlier in left:
            if earlier > place:
                break
            counts[earlier] += 1
    return chosen


class ClassOrder(Generic[C]):
    """Picks waiting requests by `next_in_order`, and remembers how often those that still wait were overtaken.

    classes: names, the most urgent one first, with `OTHERS` among them.
    """

    def __init__(self, classes: Sequence[str], most: int = OVERTAKEN) -> None:
        self._ranks = {name: rank for rank, name in enumerate(classes)}
        self._most = most
        self._overtaken: dict[C, int] = {}
        self.overtakes = 0

    def pick(self, waiting: Iterable[C], count: int, fits: Callable[[C], bool]) -> list[C]:
        """At most `count` of the `waiting` requests, which are in order of arrival; they wait no longer.

        fits(request): asked of each in turn; the first for which it is false ends the list.
        """
        if len(self._ranks) == 1:
            return list(itertools.takewhile(fits, list(itertools.islice(waiting, count))))
        requests = list(waiting)
        places = self._places(requests, count)
        chosen = list(itertools.takewhile(fits, (requests[place] for place in places)))
        gone = set(places[: len(chosen)])
        self._count(places[: len(chosen)])
        counts = {
            request: self._overtaken.get(request, 0) + sum(later > place for later in gone)
            for place, request in enumerate(requests)
            if place not in gone
        }
        self._overtaken = {request: times for request, times in counts.items() if times}
        return chosen

    def metric(self) -> Counter:
        """How often class went before arrival."""
        return Counter(
            "overtakes_total",
            "Requests, or texts, that went before an earlier one of a less urgent slo_class",
            read=lambda: self.overtakes,
        )

    @property
    def remembers(self) -> bool:
        """Whether one of those that `pick` saw last was overtaken: until the next `pick` it is held."""
        return bool(self._overtaken)

    def upcoming(self, waiting: Iterable[C], count: int) -> list[C]:
        """The requests that `pick` would ask `fits` of; nothing changes."""
        if len(self._ranks) == 1:
            return list(itertools.islice(waiting, count))
        requests = list(waiting)
        return [requests[place] for place in self._places(requests, count)]

    def _count(self, places: Sequence[int]) -> None:
        gone: set[int] = set()
        first = 0
        for place in places:
            while first in gone:
                first += 1
            self.overtakes += place > first
            gone.add(place)

    def _places(self, requests: Sequence[C], count: int) -> Sequence[int]:
        """Of the next `count` requests, in their order."""
        others = self._ranks[OTHERS]
        ranks = [self._ranks.get(request.slo_class or OTHERS, others) for request in requests]
        # Most often all that wait are of one class.
        if len(set(ranks)) <= 1:
            return range(min(count, len(requests)))
        overtaken = [self._overtaken.get(request, 0) for request in requests]
        return next_in_order(ranks, overtaken, count, self._most)
