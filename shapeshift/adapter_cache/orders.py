"""Plain orders of admission: as they came (S-LoRA), the shortest answer first (muServe), the smallest request first."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import time
from abc import abstractmethod

from shapeshift.adapter_cache.gate import Clock, Gate, Limits, T
from shapeshift.adapter_cache.interfaces import Memory
from shapeshift.adapter_cache.size import Largest, weighted

AHEAD = 2
"""Requests whose adapters are loaded while no slot is free, where there is memory beside the slots (`cache` has none
that an order may give away: there `ahead` does it)."""


class FirstComeFirstServed(Gate[T]):
    """In order of arrival, with the adapters of those who are next loaded ahead as far as there is room for them all.

    blocking: nobody passes a request whose adapter is being loaded (S-LoRA). Otherwise its slot is kept for it, and
    those behind it get theirs.
    """

    def __init__(self, memory: Memory, limits: Limits, clock: Clock = time.monotonic, blocking: bool = False) -> None:
        super().__init__(memory, dataclasses.replace(limits, patience=0.0), clock)
        self._blocking = blocking

    def _select(self) -> None:
        while self._room > 0 and self._waiting:
            if not self._take(next(iter(self._waiting)), hold=not self._blocking):
                break
        spare = self._spare_tokens()
        for request in itertools.islice(self._waiting, max(self._room, AHEAD)):
            spare -= self._place(request)
            if spare < 0 or not self._begin_load(request):
                break


class _Sorted(Gate[T]):
    """By a key that a request has when it comes; the least is next."""

    def __init__(self, memory: Memory, limits: Limits, clock: Clock = time.monotonic) -> None:
        super().__init__(memory, limits, clock)
        self._line: list[tuple[float, int, T]] = []
        self._keys: dict[T, tuple[float, int, T]] = {}
        self._numbers = itertools.count()

    @abstractmethod
    def _key(self, request: T) -> float: ...

    def _select(self) -> None:
        while self._room > 0 and self._line and self._take(self._line[0][2]):
            pass

    def _enter(self, request: T) -> None:
        self._keys[request] = key = (self._key(request), next(self._numbers), request)
        bisect.insort(self._line, key)

    def _exit(self, request: T) -> None:
        del self._line[bisect.bisect_left(self._line, self._keys.pop(request))]

    def _check(self) -> None:
        assert self._line == sorted(self._keys.values()), "the line is out of order"
        assert self._keys.keys() == self._waiting.keys(), "the line has lost a request"


class ShortestAnswerFirst(_Sorted[T]):
    """By predicted tokens of the answer, of which each second of waiting takes `ageing` off."""

    def __init__(self, memory: Memory, limits: Limits, ageing: float = 10.0, clock: Clock = time.monotonic) -> None:
        super().__init__(memory, limits, clock)
        self._ageing = ageing

    def _key(self, request: T) -> float:
        # All age alike, so that the order of two requests never changes.
        return request.predicted_tokens + self._ageing * request.arrived


class SmallestFirst(_Sorted[T]):
    """By weighted size; what it is relative to grows with what has come."""

    def __init__(self, memory: Memory, limits: Limits, clock: Clock = time.monotonic) -> None:
        super().__init__(memory, limits, clock)
        self._largest = Largest(0, 0, 0)

    def _key(self, request: T) -> float:
        size = (request.prompt_tokens, request.predicted_tokens, request.rank)
        known = self._largest
        self._largest = Largest(max(known.input, size[0]), max(known.output, size[1]), max(known.rank, size[2]))
        return weighted(*size, self._largest)
