"""Schedulers by a key: the shortest answer first (muServe), and the smallest weighted request size first."""

from __future__ import annotations

import bisect
import itertools
from abc import abstractmethod

from shapeshift.adapter_cache.policy.admission import PATIENCE, AdmissionBase, T
from shapeshift.adapter_cache.policy.request_size import Largest, weighted
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs

AGEING = 10.0
"""Predicted tokens that one second of waiting subtracts."""


_Key = tuple[int, float, int, T]


class _SortedOrder(AdmissionBase[T]):
    """By class, in a class by a key that is fixed when the request arrives; the lowest is next."""

    def __init__(self, inputs: SchedulerInputs, patience: float = PATIENCE) -> None:
        super().__init__(inputs, patience)
        self._queue: list[_Key[T]] = []
        self._keys: dict[T, _Key[T]] = {}
        self._numbers = itertools.count()

    @abstractmethod
    def _key(self, request: T) -> float: ...

    def _select(self) -> None:
        while self._free_slots > 0 and self._queue and self._try_admit(self._queue[0][3]):
            pass

    def _on_wait(self, request: T) -> None:
        rank = self._waiting.classes.rank(request.slo_class)
        self._keys[request] = key = (rank, self._key(request), next(self._numbers), request)
        bisect.insort(self._queue, key)

    def _on_leave(self, request: T, admitted: bool) -> None:
        del self._queue[bisect.bisect_left(self._queue, self._keys.pop(request))]

    def _check_order(self) -> None:
        assert self._queue == sorted(self._keys.values()), "the queue is out of order"
        assert self._keys.keys() == set(self._waiting), "the queue has lost a request"


class ShortestAnswerFirst(_SortedOrder[T]):
    """By predicted answer length, less AGEING tokens for each second of waiting."""

    def _key(self, request: T) -> float:
        # All requests age at the same rate, so the order of two requests never changes.
        return request.predicted_tokens + AGEING * request.arrived


class SmallestRequestFirst(_SortedOrder[T]):
    """By weighted request size, relative to the largest request so far."""

    def __init__(self, inputs: SchedulerInputs, patience: float = PATIENCE) -> None:
        super().__init__(inputs, patience)
        self._largest = Largest(0, 0, 0)

    def _key(self, request: T) -> float:
        size = (request.prompt_tokens, request.predicted_tokens, request.rank)
        largest = self._largest
        self._largest = Largest(max(largest.input, size[0]), max(largest.output, size[1]), max(largest.rank, size[2]))
        return weighted(*size, self._largest)
