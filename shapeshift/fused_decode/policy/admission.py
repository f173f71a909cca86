"""Admission: which waiting requests get the free slots, in which order, and how many may wait.

The decode loop asks one policy object at every iteration. Another technique may supply its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from shapeshift.serving.bounds import OTHERS, Bound, ClassOrder, QueuedRequest, unloading
from shapeshift.serving.metrics import Metric

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

    def metrics(self) -> Sequence[Metric]:
        return [self._order.metric()]

    def close(self) -> list[C]:
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        return waiting
