"""The queues of the multi-queue scheduler: their cut-offs and quotas, from what came of late (section 4.2)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shapeshift.adapter_cache.cluster import Clusters, cluster
from shapeshift.adapter_cache.quotas import QueueLoad, assign
from shapeshift.adapter_cache.size import Largest, weighted

WINDOW = 512
"""Requests that cut-offs and quotas are made from; so many cluster in about 10 ms."""
SLO_FACTOR = 5.0
"""The paper's objective: so many times what a request takes (section 2)."""
_UNKNOWN_S = 1.0


@dataclass(frozen=True)
class Sized:
    """What a request's queue follows from. cache_tokens: that it takes; adapter_tokens: what its adapter takes."""

    input_tokens: int
    output_tokens: int
    rank: int
    cache_tokens: int
    adapter_tokens: int

    @property
    def charge(self) -> int:
        """Tokens that it takes of its queue's quota."""
        return self.cache_tokens + self.adapter_tokens


@dataclass(frozen=True)
class Lanes:
    """Queue 0 holds the smallest requests. quota: tokens of each."""

    clusters: Clusters
    largest: Largest
    quota: tuple[int, ...]

    def of(self, sized: Sized) -> int:
        """Which queue a request belongs to."""
        return self.clusters.of(weighted(sized.input_tokens, sized.output_tokens, sized.rank, self.largest))


def single(total: int) -> Lanes:
    """One queue with everything."""
    return Lanes(Clusters(1, 0.0, (0.0,), ()), Largest(0, 0, 0), (total,))


class Window:
    """The requests of late: when they came, and how long those took that have ended. Not for two threads at once."""

    def __init__(self, size: int = WINDOW) -> None:
        self._came: deque[tuple[float, Sized]] = deque(maxlen=size)
        self._took: deque[tuple[Sized, float]] = deque(maxlen=size)
        self.seen = 0

    def came(self, sized: Sized, now: float) -> None:
        """A request came at `now` seconds."""
        self._came.append((now, sized))
        self.seen += 1

    def took(self, sized: Sized, seconds: float) -> None:
        """A request ran for so long."""
        self._took.append((sized, seconds))

    def lanes(self, total: int, max_queues: int, slo_s: float) -> Lanes:
        """Queues for `total` tokens of cache, at most `max_queues`; slo_s 0: five times the mean time a request runs.

        What is divided is `total` and as much for adapters as comes with it: requests share adapters, so that to
        count them against the cache would leave some of it empty.
        """
        recent = [sized for _, sized in self._came]
        if not recent:
            return single(total)
        largest = Largest(
            max(one.input_tokens for one in recent),
            max(one.output_tokens for one in recent),
            max(one.rank for one in recent),
        )
        sizes = [weighted(one.input_tokens, one.output_tokens, one.rank, largest) for one in recent]
        found = Lanes(cluster(sizes, max_k=max_queues), largest, ())
        every = [seconds for _, seconds in self._took]
        usual_s = sum(every) / len(every) if every else _UNKNOWN_S
        loads = self._loads(found, recent, usual_s)
        whole = total * sum(one.charge for one in recent) / sum(one.cache_tokens for one in recent)
        quotas = assign(loads, whole, slo_s or SLO_FACTOR * max(usual_s, 1e-3))
        return Lanes(found.clusters, largest, _whole(quotas.quota, [load.largest for load in loads]))

    def _loads(self, lanes: Lanes, recent: Sequence[Sized], usual_s: float) -> list[QueueLoad]:
        span_s = max(self._came[-1][0] - self._came[0][0], 1e-3)
        charges: list[list[int]] = [[] for _ in range(lanes.clusters.k)]
        times: list[list[float]] = [[] for _ in charges]
        for one in recent:
            charges[lanes.of(one)].append(one.charge)
        for one, seconds in self._took:
            times[lanes.of(one)].append(seconds)
        return [
            QueueLoad(max(of_lane, default=1), sum(took) / len(took) if took else usual_s, len(of_lane) / span_s)
            for of_lane, took in zip(charges, times, strict=True)
        ]


def _whole(quota: Sequence[float], sizes: Sequence[float]) -> tuple[int, ...]:
    """Quotas that hold whole requests: the queueing model divides finely, and what is left over serves nobody.

    The queue of the largest gives what the others are rounded up by, down to one request of its own.
    """
    made = [math.ceil(tokens / size) * math.ceil(size) for tokens, size in zip(quota[:-1], sizes, strict=False)]
    rest = int(sum(quota)) - sum(made)
    return (*made, rest) if rest >= sizes[-1] else tuple(map(int, quota))
