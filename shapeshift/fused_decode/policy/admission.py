"""Admission: which waiting requests get the free slots, in which order, and how many may wait.

The decode loop asks one policy object at every iteration. Another technique may supply its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from shapeshift.serving.bounds import Bound, unloading
from shapeshift.serving.metrics import Metric


class QueuedRequest(Protocol):
    """A request whose `slo_class` is a name or None."""

    @property
    def slo_class(self) -> str | None: ...


OTHERS = "*"
"""Stands in a list of classes for all that it does not name."""
OVERTAKEN = 32
"""Most later requests that go before a waiting one because their class is more urgent."""

C = TypeVar("C", bound=QueuedRequest)


def always(request: QueuedRequest) -> bool:
    """Every request fits."""
    return True


def nothing(request: QueuedRequest) -> int:
    """No request shares anything."""
    return 0


class Admission(Protocol[C]):
    """The waiting requests. Any thread may call `submit` and `refuse_when_full`, the generating thread the rest."""

    def __len__(self) -> int:
        """Number of waiting requests."""
        ...

    def refuse_when_full(self) -> None:
        """Raise OverloadedError where no further request may wait, whatever its size."""
        ...

    def submit(self, request: C) -> None:
        """Queue `request`. Raises OverloadedError, naming the limit, where it does not fit."""
        ...

    def admit(self, free: int, fits: Callable[[C], bool] = always, shared: Callable[[C], int] = nothing) -> list[C]:
        """At most `free` requests that get a slot now; they wait no longer.

        fits(request): asked of each of them in turn, whether memory and slots hold it beside those before it; beams
        take a slot each. An admission that knows the memory itself need not ask.
        shared(request): the tokens of a request without slots that take no memory, since running ones have them
        """
        ...

    def squash(self) -> list[C]:
        """Running requests to preempt now; they are back in the queue. Called before `admit`."""
        return []

    def preempted(self, request: C) -> None:
        """A running request has lost its slot, since others needed its memory; it waits again, in its old place."""
        ...

    def withdraw(self, request: C) -> bool:
        """Remove a waiting request; False where it does not wait."""
        ...

    def finished(self, request: C) -> None:
        """An admitted request has left its slot."""
        ...

    def close(self) -> list[C]:
        """Refuse all further requests; returns those that still wait, in order."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when its records of the requests contradict one another."""
        return

    def metrics(self) -> Sequence[Metric]:
        """What it exports beside the number of waiting requests."""
        return ()


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
        counts = {
            request: self._overtaken.get(request, 0) + sum(later > place for later in gone)
            for place, request in enumerate(requests)
            if place not in gone
        }
        self._overtaken = {request: times for request, times in counts.items() if times}
        return chosen

    def upcoming(self, waiting: Iterable[C], count: int) -> list[C]:
        """The requests that `pick` would ask `fits` of; nothing changes."""
        if len(self._ranks) == 1:
            return list(itertools.islice(waiting, count))
        requests = list(waiting)
        return [requests[place] for place in self._places(requests, count)]

    def _places(self, requests: Sequence[C], count: int) -> Sequence[int]:
        """Of the next `count` requests, in their order."""
        others = self._ranks[OTHERS]
        ranks = [self._ranks.get(request.slo_class or OTHERS, others) for request in requests]
        # Most often all that wait are of one class.
        if len(set(ranks)) <= 1:
            return range(min(count, len(requests)))
        overtaken = [self._overtaken.get(request, 0) for request in requests]
        return next_in_order(ranks, overtaken, count, self._most)


class FirstComeFirstServed(Admission[C]):
    """In order of arrival, but for what `order` picks first."""

    def __init__(self, queue_requests: int, classes: Sequence[str] = (OTHERS,)) -> None:
        """queue_requests: most that wait; classes: see `ClassOrder`."""
        self._order: ClassOrder[C] = ClassOrder(classes)
        self._bound = Bound("queue_requests", queue_requests, "requests")
        self._waiting: dict[C, None] = {}
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def refuse_when_full(self) -> None:
        if self._closed:
            raise unloading()
        self._bound.require(len(self._waiting))

    def submit(self, request: C) -> None:
        with self._lock:
            self.refuse_when_full()
            self._waiting[request] = None

    def admit(self, free: int, fits: Callable[[C], bool] = always, shared: Callable[[C], int] = nothing) -> list[C]:
        if not self._waiting or not free:
            return []
        with self._lock:
            chosen = self._order.pick(self._waiting, free, fits)
            for request in chosen:
                del self._waiting[request]
        return chosen

    def preempted(self, request: C) -> None:
        with self._lock:
            # Those that are preempted together come youngest first.
            self._waiting = {request: None, **self._waiting}

    def withdraw(self, request: C) -> bool:
        with self._lock:
            if request not in self._waiting:
                return False
            del self._waiting[request]
        return True

    def finished(self, request: C) -> None:
        """Running requests are not tracked."""

    def close(self) -> list[C]:
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        return waiting
