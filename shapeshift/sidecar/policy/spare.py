"""Which worker models are loaded next: on the nodes with the most room."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence

from shapeshift.triton.names import split


def in_order(spare: Sequence[str], loaded: Collection[str]) -> list[str]:
    """The worker models `spare` of a front in the order in which to load them. loaded: its workers now.

    Each next model is on the node that has the smallest share of the front's models on it loaded, so that the nodes
    fill evenly.
    """
    held = Counter(split(worker)[0] for worker in loaded)
    size = Counter(split(model)[0] for model in {*loaded, *spare})
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
