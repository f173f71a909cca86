"""A queue that refuses what it cannot hold, counted in rows and in tokens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from shapeshift.errors import OverloadedError


class Weighted(Protocol):
    """An item that knows its length in tokens."""

    @property
    def tokens(self) -> int: ...


T = TypeVar("T", bound=Weighted)


class BoundedQueue(Generic[T]):
    """First in, first out; producers never wait, consumers do."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._items: deque[T] = deque()
        self._tokens = 0
        self._closed = False
        self._ready = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Sequence[T]) -> None:
        """Append all of `items` or none: OverloadedError, naming the limit, when they do not fit.

        An empty queue takes any request, however large, so that no limit makes one impossible.
        """
        tokens = sum(item.tokens for item in items)
        with self._ready:
            if self._closed:
                raise OverloadedError("the model is being unloaded; retry elsewhere")
            if self._items:
                self._refuse("rows", len(self._items), len(items), self._max_rows)
                self._refuse("tokens", self._tokens, tokens, self._max_tokens)
            self._items.extend(items)
            self._tokens += tokens
            self._ready.notify(len(items))

    def take(self, decide: Callable[[Iterable[int], int], int]) -> list[T]:
        """Wait for work, then remove as many items from the head as `decide` says; [] once closed.

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
            return taken

    def waiting(self) -> list[T]:
        """What waits at this moment, in order."""
        with self._ready:
            return list(self._items)

    def close(self) -> list[T]:
        """Refuse further items, wake every consumer, and return what was still waiting."""
        with self._ready:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._tokens = 0
            self._ready.notify_all()
        return left

    def check_integrity(self) -> None:
        """Raise AssertionError when the token count does not match the items."""
        with self._ready:
            assert self._tokens == sum(item.tokens for item in self._items), "token count is off"

    @staticmethod
    def _refuse(unit: str, held: int, added: int, limit: int) -> None:
        if held + added > limit:
            raise OverloadedError(f"the queue is full: {held} {unit} wait, {added} more exceed {limit}; retry later")
