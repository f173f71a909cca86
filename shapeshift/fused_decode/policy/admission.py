"""Admission: which waiting requests get the free slots, in which order, and how many may wait.

The decode loop asks one policy object at every iteration. Another technique may supply its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from shapeshift.serving.bounds import OTHERS, Bound, ClassQueue, QueuedRequest, SloClasses, unloading
from shapeshift.serving.metrics import Metric

C = TypeVar("C", bound=QueuedRequest)


def always(request: QueuedRequest) -> bool:
    """Every request fits."""
    return True


def nothing(request: QueuedRequest) -> int:
    """No request shares anything."""
    return 0


def displaced(bound: Bound, held: int, waiting: ClassQueue[C], slo_class: str | None) -> C | None:
    """Whose place a request of that class takes where the queue holds so many; None where it takes nobody's.

    Raises OverloadedError where the queue is full of requests that are no less urgent.
    """
    last = waiting.last_below(slo_class) if held >= bound.limit else None
    if last is None:
        bound.require(held)
    return last


class Admission(Protocol[C]):
    """The waiting requests. Any thread may call `submit` and `refuse_when_full`, the generating thread the rest."""

    def __len__(self) -> int:
        """Number of waiting requests."""
        ...

    def refuse_when_full(self, slo_class: str | None = None) -> None:
        """Raise OverloadedError where no further request of that class may wait, whatever its size."""
        ...

    def submit(self, request: C) -> C | None:
        """Queue `request`. Raises OverloadedError, naming the limit, where it does not fit.

        Returns the request of a less urgent class that waits no longer, where it took the place of one.
        """
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


class FirstComeFirstServed(Admission[C]):
    """In order of class and arrival."""

    def __init__(self, queue_requests: int, classes: Sequence[str] = (OTHERS,)) -> None:
        """queue_requests: most that wait; classes: see `SloClasses`."""
        self._bound = Bound("queue_requests", queue_requests, "requests")
        self._waiting: ClassQueue[C] = ClassQueue(SloClasses(classes))
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def refuse_when_full(self, slo_class: str | None = None) -> None:
        if self._closed:
            raise unloading()
        with self._lock:
            displaced(self._bound, len(self._waiting), self._waiting, slo_class)

    def submit(self, request: C) -> C | None:
        with self._lock:
            if self._closed:
                raise unloading()
            last = displaced(self._bound, len(self._waiting), self._waiting, request.slo_class)
            if last is not None:
                self._waiting.remove(last)
            self._waiting.add(request)
        return last

    def admit(self, free: int, fits: Callable[[C], bool] = always, shared: Callable[[C], int] = nothing) -> list[C]:
        if not self._waiting or not free:
            return []
        with self._lock:
            return self._waiting.take(free, fits)

    def preempted(self, request: C) -> None:
        with self._lock:
            self._waiting.add(request)

    def withdraw(self, request: C) -> bool:
        with self._lock:
            return self._waiting.remove(request)

    def finished(self, request: C) -> None:
        """Running requests are not tracked."""

    def metrics(self) -> Sequence[Metric]:
        return self._waiting.classes.metrics()

    def close(self) -> list[C]:
        with self._lock:
            self._closed = True
            return self._waiting.clear()
