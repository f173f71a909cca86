"""A queue with bounds on its rows and on their tokens, which knows what they cost."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from shapeshift.serving.bounds import Bound, unloading


class Weighted(Protocol):
    """An item with a length in tokens."""

    @property
    def tokens(self) -> int: ...


T = TypeVar("T", bound=Weighted)


class BoundedQueue(Generic[T]):
    """First in, first out; producers never wait, consumers do. cost_ms: of an item, by the profile."""

    def __init__(self, max_rows: int, max_tokens: int, cost_ms: Callable[[T], float] = lambda item: 0.0) -> None:
        self._rows_bound = Bound("queue_rows", max_rows, "rows")
        self._tokens_bound = Bound("queue_tokens", max_tokens, "tokens")
        self._items: deque[T] = deque()
        self._tokens = 0
        self._cost_ms = cost_ms
        self._waiting_ms = 0.0
        self._closed = False
        self._ready = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def waiting_ms(self) -> float:
        """What the waiting items cost together."""
        return self._waiting_ms

    def put(self, items: Sequence[T]) -> None:
        """Append all of `items` or none; OverloadedError naming the limit where they do not fit.

        An empty queue takes any request, however large, so that no limit makes one impossible.
        """
        tokens = sum(item.tokens for item in items)
        with self._ready:
            if self._closed:
                raise unloading()
            if self._items:
                self._rows_bound.require(len(self._items), len(items))
                self._tokens_bound.require(self._tokens, tokens)
            self._items.extend(items)
            self._tokens += tokens
            self._waiting_ms += sum(map(self._cost_ms, items))
            self._ready.notify(len(items))

    def take(self, decide: Callable[[Iterable[int], int], int]) -> list[T]:
        """Wait for items, then remove as many from the head as `decide` returns; [] once closed.

        decide(lengths, waiting): the waiting items' tokens in order and their number; at least 1.
        """
        with self._ready:
            while not self._items and not self._closed:
                self._ready.wait()
            if not self._items:
                return []
            count = decide((item.tokens for item in self._items), len(self._items))
            taken = [self._items.popleft() for _ in range(count)]
            self._tokens -= sum(item.tokens for item in taken)
            # An empty queue costs nothing, whatever the rounding of the sums.
            self._waiting_ms = self._waiting_ms - sum(map(self._cost_ms, taken)) if self._items else 0.0
            return taken

    def waiting(self) -> list[T]:
        """The items that wait now, in order."""
        with self._ready:
            return list(self._items)

    def close(self) -> list[T]:
        """Refuse further items, wake every consumer, and return the items that still waited."""
        with self._ready:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._tokens, self._waiting_ms = 0, 0.0
            self._ready.notify_all()
        return left

    def check_integrity(self) -> None:
        """Raise AssertionError where the count of tokens, or the cost, is not that of the items."""
        with self._ready:
            assert self._tokens == sum(item.tokens for item in self._items), "token count is off"
            assert math.isclose(self._waiting_ms, sum(map(self._cost_ms, self._items)), abs_tol=1e-6), "cost is off"
