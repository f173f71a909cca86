"""Which worker models are loaded next: on the devices and nodes with the most room."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence

from shapeshift.sidecar.front_config import Front
from shapeshift.triton.names import split

# A node and the number of a worker there: worker 3 of every front can use the same device.
Slot = tuple[str, int | None]


def slot(front: Front, worker: str) -> Slot:
    """The slot of a worker model of the front."""
    return split(worker)[0], front.worker_number(worker)


def in_order(front: Front, spare: Sequence[str], loaded: Collection[str], used: Collection[Slot]) -> list[str]:
    """The worker models `spare` in the order in which to load them: slots that no other front uses come first.

    loaded: the front's workers now; used: the slots of the other fronts of its pool. Each next model is on the node
    that has the smallest share of the front's models on it loaded, so that the nodes fill evenly.
    """
    free = [model for model in spare if slot(front, model) not in used]
    taken = [model for model in spare if slot(front, model) in used]
    first = _evenly(free, loaded, spare)
    return first + _evenly(taken, [*loaded, *first], spare)


def _evenly(spare: Sequence[str], loaded: Collection[str], models: Collection[str]) -> list[str]:
    held = Counter(split(worker)[0] for worker in loaded)
    size = Counter(split(model)[0] for model in {*loaded, *models})
    waiting: dict[str, list[str]] = {}
    for model in reversed(spare):
        waiting.setdefault(split(model)[0], []).append(model)
    heap = [(held[node] / size[node], node) for node in waiting]
    heapq.heapify(heap)
    order = []
    while heap:
        _, node = heapq.heappop(heap)
        order.append(waiting[node].pop())
        held[node] += 1
        if waiting[node]:
            heapq.heappush(heap, (held[node] / size[node], node))
    return order
