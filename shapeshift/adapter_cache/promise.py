"""Who must not be passed any longer: a bound on overtaking, whatever the order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container
from typing import Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """Once `patience` times as many have been admitted since a request came as there were before it, it is due.

    Counted in admissions, so that it holds at any speed; first come, first served would need one times as many.
    """

    def __init__(self, patience: float) -> None:
        self.admissions = 0
        self._patience = patience
        self._line: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()

    def give(self, request: T, before: int) -> None:
        """`request` waits from now on; before: those that wait or run already."""
        if self._patience:
            due = self.admissions + self._patience * before
            heapq.heappush(self._line, (due, next(self._numbers), request))

    def due(self, waiting: Container[T]) -> T | None:
        """Who of those that are still `waiting` is due, and has been for longest."""
        while self._line and self._line[0][2] not in waiting:
            heapq.heappop(self._line)
        return self._line[0][2] if self._line and self._line[0][0] <= self.admissions else None
