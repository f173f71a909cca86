"""The queues of the multi-queue scheduler: cutoffs and quotas from the recent requests (Chameleon, section 4.2)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shapeshift.adapter_cache.policy.cluster import Clusters, cluster
from shapeshift.adapter_cache.policy.quotas import QueueLoad, assign
from shapeshift.adapter_cache.policy.request_size import Largest, weighted

WINDOW = 512
"""Recent requests that cutoffs and quotas are computed from; clustering them takes about 10 ms."""
SLO_FACTOR = 5.0
"""The paper's latency objective, as a multiple of a request's run time (section 2)."""
_DEFAULT_RUN_S = 1.0


@dataclass(frozen=True)
class RequestCost:
    """What decides a request's queue. cache_tokens: KV cache it takes; adapter_tokens: memory of its adapter."""

    input_tokens: int
    output_tokens: int
    rank: int
    cache_tokens: int
    adapter_tokens: int

    @property
    def charge(self) -> int:
        """Tokens that it takes from the quota of its queue."""
        return self.cache_tokens + self.adapter_tokens


@dataclass(frozen=True)
class SizeQueues:
    """Queues by weighted request size; queue 0 holds the smallest requests. quota: tokens of each queue."""

    clusters: Clusters
    largest: Largest
    quota: tuple[int, ...]

    def queue_of(self, cost: RequestCost) -> int:
        """The queue of a request."""
        return self.clusters.of(weighted(cost.input_tokens, cost.output_tokens, cost.rank, self.largest))


def single(total: int) -> SizeQueues:
    """One queue with all tokens."""
    return SizeQueues(Clusters(1, 0.0, (0.0,), ()), Largest(0, 0, 0), (total,))


class RecentRequests:
    """When the recent requests arrived, and how long the recently finished ones ran. Not safe for concurrent calls."""

    def __init__(self, size: int = WINDOW) -> None:
        self._arrivals: deque[tuple[float, RequestCost]] = deque(maxlen=size)
        self._finished: deque[tuple[RequestCost, float]] = deque(maxlen=size)
        self.count = 0

    def add_arrival(self, cost: RequestCost, now: float) -> None:
        """A request arrived at `now` seconds."""
        self._arrivals.append((now, cost))
        self.count += 1

    def add_finished(self, cost: RequestCost, seconds: float) -> None:
        """A request ran for `seconds`."""
        self._finished.append((cost, seconds))

    def make_queues(self, total: int, max_queues: int) -> SizeQueues:
        """Queues for `total` tokens of KV cache; the latency objective is five times the mean run time.

        The quotas divide `total` plus the adapters' share in proportion. Requests share adapters, so charging the
        adapters to `total` would leave some of the cache empty.
        """
        recent = [cost for _, cost in self._arrivals]
        if not recent:
            return single(total)
        largest = Largest(
            max(cost.input_tokens for cost in recent),
            max(cost.output_tokens for cost in recent),
            max(cost.rank for cost in recent),
        )
        sizes = [weighted(cost.input_tokens, cost.output_tokens, cost.rank, largest) for cost in recent]
        queues = SizeQueues(cluster(sizes, max_k=max_queues), largest, ())
        run_times = [seconds for _, seconds in self._finished]
        mean_s = sum(run_times) / len(run_times) if run_times else _DEFAULT_RUN_S
        loads = self._loads(queues, recent, mean_s)
        whole = total * sum(cost.charge for cost in recent) / sum(cost.cache_tokens for cost in recent)
        quotas = assign(loads, whole, SLO_FACTOR * max(mean_s, 1e-3))
        return SizeQueues(queues.clusters, largest, _whole(quotas.quota, [load.largest for load in loads]))

    def _loads(self, queues: SizeQueues, recent: Sequence[RequestCost], mean_s: float) -> list[QueueLoad]:
        span_s = max(self._arrivals[-1][0] - self._arrivals[0][0], 1e-3)
        charges: list[list[int]] = [[] for _ in range(queues.clusters.k)]
        run_times: list[list[float]] = [[] for _ in charges]
        for cost in recent:
            charges[queues.queue_of(cost)].append(cost.charge)
        for cost, seconds in self._finished:
            run_times[queues.queue_of(cost)].append(seconds)
        return [
            QueueLoad(max(charged, default=1), sum(times) / len(times) if times else mean_s, len(charged) / span_s)
            for charged, times in zip(charges, run_times, strict=True)
        ]


def _whole(quota: Sequence[float], sizes: Sequence[float]) -> tuple[int, ...]:
    """Quotas rounded up to whole requests; a fraction of a request serves none.

    The queue of the largest requests gives up the difference, but keeps at least one request.
    """
    rounded = [math.ceil(tokens / size) * math.ceil(size) for tokens, size in zip(quota[:-1], sizes, strict=False)]
    rest = int(sum(quota)) - sum(rounded)
    return (*rounded, rest) if rest >= sizes[-1] else tuple(map(int, quota))
