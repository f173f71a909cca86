"""Dispatch in a running system: the decisions of `dispatch.choose` in microseconds.

Each level keeps its instances in a heap and the score of its head. Every request updates both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic

from shapeshift.polymorph.policy.dispatch import Id, Rules, scoring


class _Queue(Generic[Id]):
    """One level's instances. The heap's top is always valid; other entries may be stale."""

    def __init__(self, service_ms: float) -> None:
        self.service_ms = service_ms
        self.outstanding: dict[Id, int] = {}
        self.capacity: dict[Id, float] = {}
        self.heap: list[tuple[int, Id]] = []

    def push(self, instance: Id) -> None:
        """Update the heap after the instance's outstanding requests changed."""
        heap, outstanding = self.heap, self.outstanding
        heappush(heap, (outstanding[instance], instance))
        if len(heap) > 4 * len(outstanding) + 64:
            heap[:] = [(count, one) for one, count in outstanding.items()]
            heapify(heap)
        self.settle()

    def settle(self) -> None:
        """Drop stale entries from the top."""
        heap, outstanding = self.heap, self.outstanding
        while heap and outstanding.get(heap[0][1]) != heap[0][0]:
            heappop(heap)


class Dispatcher(Generic[Id]):
    """The levels of a running system, with a decision in O(peek + log instances). Not thread-safe.

    max_lengths: of the levels, strictly ascending; services_ms: of one request on each; rules.algorithm: one of
    `dispatch.SCORED`. Raises ValueError naming the field.
    """

    def __init__(self, max_lengths: Sequence[int], services_ms: Sequence[float], rules: Rules) -> None:
        if any(b <= a for a, b in zip(max_lengths, max_lengths[1:], strict=False)):
            raise ValueError(f"max_lengths: got {max_lengths}; strictly ascending")
        if len(services_ms) != len(max_lengths):
            raise ValueError(f"services_ms: got {len(services_ms)} values; as many as levels ({len(max_lengths)})")
        self._rules = rules
        self._score, self._pick = scoring(rules.algorithm)
        self._peek = rules.peek
        self._lengths = list(max_lengths)
        self._queues: list[_Queue[Id]] = [_Queue(ms) for ms in services_ms]
        self._level_of: dict[Id, int] = {}
        # Only levels with instances: their indices, max lengths, and the scores of their heads.
        self._deployed: list[int] = []
        self._deployed_lengths: list[int] = []
        self._scores: list[float] = []

    def add(self, level: int, instance: Id, capacity: float, outstanding: int = 0) -> None:
        """Add an instance. Raises ValueError for one that is present, or a capacity that is not above 0."""
        if instance in self._level_of:
            raise ValueError(f"instance: got {instance!r}; it is present already")
        if capacity <= 0 or outstanding < 0:
            raise ValueError(f"capacity, outstanding: got {capacity}, {outstanding}; above 0, at least 0")
        queue = self._queues[level]
        self._level_of[instance] = level
        queue.outstanding[instance] = outstanding
        queue.capacity[instance] = capacity
        queue.push(instance)
        self._redeploy()

    def remove(self, instance: Id) -> int:
        """Remove an instance and return its outstanding requests. Raises KeyError for an unknown one."""
        queue = self._queues[self._level_of.pop(instance)]
        del queue.capacity[instance]
        outstanding = queue.outstanding.pop(instance)
        queue.settle()
        self._redeploy()
        return outstanding

    def heads(self, length: int) -> list[Id]:
        """The instances among which `dispatch` would choose."""
        start = bisect_left(self._deployed_lengths, length)
        return [self._queues[level].heap[0][1] for level in self._deployed[start : start + self._peek]]

    def dispatch(self, length: int) -> tuple[int, Id] | None:
        """Choose level and instance, and count the request as outstanding; None if no level can take it."""
        start = bisect_left(self._deployed_lengths, length)
        scores = self._scores[start : start + self._peek]
        if not scores:
            return None
        place = start + self._pick(scores, self._rules)
        level = self._deployed[place]
        queue = self._queues[level]
        count, instance = queue.heap[0]
        queue.outstanding[instance] = count + 1
        heapreplace(queue.heap, (count + 1, instance))
        queue.settle()
        self._rescore(place, queue)
        return level, instance

    def finish(self, instance: Id) -> None:
        """Record that a request of the instance was answered.

        Raises KeyError for an unknown instance, ValueError for one without outstanding requests.
        """
        level = self._level_of[instance]
        queue = self._queues[level]
        if queue.outstanding[instance] == 0:
            raise ValueError(f"instance: {instance!r} has no outstanding request")
        queue.outstanding[instance] -= 1
        queue.push(instance)
        self._rescore(bisect_left(self._deployed, level), queue)

    def check_integrity(self) -> None:
        """Raise AssertionError where heads and scores do not match the instances."""
        assert self._deployed == [index for index, queue in enumerate(self._queues) if queue.outstanding]
        for place, index in enumerate(self._deployed):
            queue = self._queues[index]
            count, head = min((count, instance) for instance, count in queue.outstanding.items())
            assert queue.heap[0] == (count, head)
            assert self._scores[place] == self._score(count, queue.capacity[head], queue.service_ms)
        assert self._level_of == {one: level for level, queue in enumerate(self._queues) for one in queue.outstanding}

    def _rescore(self, place: int, queue: _Queue[Id]) -> None:
        count, head = queue.heap[0]
        self._scores[place] = self._score(count, queue.capacity[head], queue.service_ms)

    def _redeploy(self) -> None:
        self._deployed = [index for index, queue in enumerate(self._queues) if queue.outstanding]
        self._deployed_lengths = [self._lengths[index] for index in self._deployed]
        self._scores = [0.0] * len(self._deployed)
        for place, index in enumerate(self._deployed):
            self._rescore(place, self._queues[index])
