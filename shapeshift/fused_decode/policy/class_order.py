"""Which waiting requests go first: those of urgent classes, with a bound on how often a request is overtaken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

OTHERS = "*"
"""Stands in a list of classes for all that it does not name."""


class ClassedRequest(Protocol):
    """A request whose `slo_class` is a name or None."""

    @property
    def slo_class(self) -> str | None: ...


T = TypeVar("T", bound=ClassedRequest)


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


class ClassOrder(Generic[T]):
    """Picks waiting requests by `next_in_order`, and remembers how often those that still wait were overtaken.

    classes: names, the most urgent one first, with `OTHERS` among them.
    """

    def __init__(self, classes: Sequence[str], most: int) -> None:
        self._ranks = {name: rank for rank, name in enumerate(classes)}
        self._most = most
        self._overtaken: dict[T, int] = {}

    def pick(self, waiting: Iterable[T], count: int, fits: Callable[[T], bool]) -> list[T]:
        """At most `count` of the `waiting` requests, which are in order of arrival; they wait no longer.

        fits(request): asked of each in turn; the first for which it is false ends the list.
        """
        if len(self._ranks) == 1:
            return list(itertools.takewhile(fits, list(itertools.islice(waiting, count))))
        requests = list(waiting)
        places = self._places(requests, count)
        chosen = list(itertools.takewhile(fits, (requests[place] for place in places)))
        gone = set(places[: len(chosen)])
        counts = {
            request: self._overtaken.get(request, 0) + sum(later > place for later in gone)
            for place, request in enumerate(requests)
            if place not in gone
        }
        self._overtaken = {request: times for request, times in counts.items() if times}
        return chosen

    def upcoming(self, waiting: Iterable[T], count: int) -> list[T]:
        """The requests that `pick` would ask `fits` of; nothing changes."""
        if len(self._ranks) == 1:
            return list(itertools.islice(waiting, count))
        requests = list(waiting)
        return [requests[place] for place in self._places(requests, count)]

    def _places(self, requests: Sequence[T], count: int) -> Sequence[int]:
        """Of the next `count` requests, in their order."""
        others = self._ranks[OTHERS]
        ranks = [self._ranks.get(request.slo_class or OTHERS, others) for request in requests]
        # Most often all that wait are of one class.
        if len(set(ranks)) <= 1:
            return range(min(count, len(requests)))
        overtaken = [self._overtaken.get(request, 0) for request in requests]
        return next_in_order(ranks, overtaken, count, self._most)
