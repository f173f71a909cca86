"""Which waiting requests get the free slots, and how many may wait.

A policy is one object that the decode loop asks at every iteration; another technique may bring its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shapeshift.errors import OverloadedError


class Weighted(Protocol):
    """A request that knows how many tokens it may come to: its prompt and the longest answer."""

    @property
    def tokens(self) -> int: ...


T = TypeVar("T", bound=Weighted)


class Admission(Protocol[T]):
    """The waiting requests. `submit` may be called by any thread, the others by the generating thread."""

    def __len__(self) -> int:
        """How many wait."""
        ...

    def refuse_when_full(self) -> None:
        """OverloadedError when no further request may wait, whatever its size; any thread."""
        ...

    def submit(self, request: T) -> None:
        """Let `request` wait; OverloadedError, naming the limit, when it does not fit."""
        ...

    def admit(self, free: int) -> list[T]:
        """At most `free` requests, removed from those that wait, that get a slot now."""
        ...

    def squash(self) -> list[T]:
        """Admitted requests that give their slots back now; they wait again already. Asked before `admit`."""
        return []

    def withdraw(self, request: T) -> bool:
        """Forget a request that no longer waits for a slot; False where it did not wait."""
        ...

    def finished(self, request: T) -> None:
        """An admitted request has left its slot."""
        ...

    def close(self) -> list[T]:
        """Refuse whatever comes from now on; what still waited, in order."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts do not match what waits."""
        ...


@dataclass(frozen=True)
class Bounds:
    """Most requests that may wait, and most tokens that these may come to."""

    requests: int
    tokens: int

    def require_place(self, waiting: int) -> None:
        """OverloadedError where no more than the `waiting` requests may wait."""
        if waiting >= self.requests:
            raise OverloadedError(f"queue_requests: {waiting} requests wait, at most {self.requests} may; retry later")

    def require_tokens(self, waiting: int, more: int) -> None:
        """OverloadedError where `more` tokens are too many; where none wait, no request is too large."""
        if waiting and waiting + more > self.tokens:
            raise OverloadedError(f"queue_tokens: {waiting} tokens wait, {more} more exceed {self.tokens}; retry later")


CLOSED = "the model is being unloaded; retry elsewhere"


class FirstComeFirstServed(Admission[T]):
    """In order of arrival."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._bounds = Bounds(max_requests, max_tokens)
        self._waiting: dict[T, None] = {}
        self._tokens = 0
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def refuse_when_full(self) -> None:
        if self._closed:
            raise OverloadedError(CLOSED)
        self._bounds.require_place(len(self._waiting))

    def submit(self, request: T) -> None:
        with self._lock:
            self.refuse_when_full()
            self._bounds.require_tokens(self._tokens, request.tokens)
            self._waiting[request] = None
            self._tokens += request.tokens

    def admit(self, free: int) -> list[T]:
        if not self._waiting or not free:
            return []
        with self._lock:
            chosen = [request for request, _ in zip(self._waiting, range(free), strict=False)]
            for request in chosen:
                self._remove(request)
        return chosen

    def withdraw(self, request: T) -> bool:
        with self._lock:
            if request not in self._waiting:
                return False
            self._remove(request)
        return True

    def finished(self, request: T) -> None:
        """Nothing is held for a running request."""

    def close(self) -> list[T]:
        with self._lock:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._tokens = 0
        return left

    def check_integrity(self) -> None:
        with self._lock:
            assert self._tokens == sum(request.tokens for request in self._waiting), "the token count is off"

    def _remove(self, request: T) -> None:
        del self._waiting[request]
        self._tokens -= request.tokens
