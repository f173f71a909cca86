"""Chameleon's scheduler: size queues with quotas, so that large requests do not delay small ones (section 4.2)."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable
from functools import partial

from shapeshift.adapter_cache.policy.admission import PATIENCE, AdmissionBase, T
from shapeshift.adapter_cache.policy.bypass import allowed, head_wait_s
from shapeshift.adapter_cache.policy.quota_admission import Ledger, first_phase, second_phase
from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs
from shapeshift.adapter_cache.policy.size_queues import RecentRequests, RequestCost, single
from shapeshift.fused_decode.policy.admission import always, nothing
from shapeshift.serving.bounds import ClassQueue, SloClasses
from shapeshift.serving.metrics import Counter, Gauge, Metric

MAX_QUEUES = 4
RECLUSTER_S = 300.0
"""The paper's."""
FIRST_CLUSTERING = 64
"""Requests after which the first queues are built; until then there is one."""
MAX_BYPASS_CANDIDATES = 16
"""Requests behind a blocked head that may overtake it."""
_SMOOTHING = 0.1


class MultiQueue(AdmissionBase[T]):
    """Two-phase admission from size queues that are rebuilt from time to time, with bypass and squash.

    A request that overtook a head and runs longer than predicted is squashed, at most once, if that head still waits.
    """

    def __init__(
        self, inputs: SchedulerInputs, patience: float = PATIENCE, recluster_s: float = RECLUSTER_S, bypass: bool = True
    ) -> None:
        """recluster_s: seconds between two rebuilds; bypass: whether a request may overtake a head that waits."""
        super().__init__(inputs, patience)
        self._recluster_s = recluster_s
        self._bypass = bypass
        self._adapter_tokens = inputs.adapter_tokens
        self._recent = RecentRequests()
        self._size_queues = single(inputs.memory.total_tokens)
        self._ledger = Ledger(self._size_queues.quota)
        self._classes = inputs.classes
        self._queues: list[ClassQueue[T]] = [ClassQueue(SloClasses(self._classes))]
        self._next_recluster: float | None = None
        self._costs: dict[T, RequestCost] = {}
        self._charges: dict[T, tuple[int, int]] = {}
        self._started: dict[T, float] = {}
        self._iteration_s = 0.0
        self._last_admit: float | None = None
        # Of the current call of `admit`: heads that wait for memory, with the wait in seconds; candidates that failed.
        self._blocked: dict[int, tuple[T, float]] = {}
        self._tried: set[T] = set()
        # Requests that overtook a head, with that head; requests that were squashed.
        self._overtook: dict[T, T] = {}
        self._squashed: set[T] = set()
        self.squashes = 0
        self.bypasses = 0

    @property
    def quotas(self) -> list[int]:
        """Tokens that the requests of each queue may hold."""
        return list(self._size_queues.quota)

    def metrics(self) -> list[Metric]:
        metrics: list[Metric] = [
            *super().metrics(),
            Counter(
                "adapter_squashes_total",
                "Requests squashed because they delayed a request that they had overtaken",
                read=lambda: self.squashes,
            ),
            Counter("adapter_bypasses_total", "Requests that overtook a queue's head", read=lambda: self.bypasses),
        ]
        for queue in range(MAX_QUEUES):
            labels = {"queue": str(queue)}
            waiting, quota = partial(self._length, queue), partial(self._quota, queue)
            metrics.append(Gauge("adapter_queue_requests", "Waiting requests, by queue", waiting, labels))
            metrics.append(Gauge("adapter_queue_quota_tokens", "Tokens that a queue may hold", quota, labels))
        return metrics

    # The admission protocol.

    def admit(self, free: int, fits: Callable[[T], bool] = always, shared: Callable[[T], int] = nothing) -> list[T]:
        self._tick()
        return super().admit(free, fits, shared)

    def squash(self) -> list[T]:
        with self._lock:
            self._overtook = {request: head for request, head in self._overtook.items() if head in self._waiting}
            late = [
                request
                for request in self._overtook
                if request in self._running and request.generated > request.predicted_tokens
            ]
            for request in late:
                del self._overtook[request]
                self._squashed.add(request)
                self._squash(request)
            self.squashes += len(late)
        return late

    # The order.

    def _select(self) -> None:
        self._blocked.clear()
        self._tried.clear()
        first_phase(self._ledger, self._next_charge, self._try_next)
        second_phase(self._ledger, self._next_charge, self._try_next, lambda queue: bool(self._queues[queue]))

    def _passed_over(self) -> list[T]:
        return [head for head, _ in self._blocked.values()]

    def _on_submit(self, request: T) -> None:
        tokens = request.prompt_tokens + request.predicted_tokens
        self._costs[request] = RequestCost(
            request.prompt_tokens,
            request.predicted_tokens,
            request.rank,
            request.rows * self._in_blocks(tokens),
            self._adapter_tokens(request.adapter),
        )
        self._recent.add_arrival(self._costs[request], request.arrived)

    def _on_wait(self, request: T) -> None:
        self._queues[self._queue_of(request)].add(request)

    def _on_leave(self, request: T, admitted: bool) -> None:
        queue = self._queues[self._queue_of(request)]
        # One that is withdrawn has overtaken nobody.
        (queue.start if admitted else queue.remove)(request)

    def _on_charge(self, request: T) -> None:
        self._charge(request)
        self._started[request] = self._clock()

    def _on_refund(self, request: T) -> None:
        queue, tokens = self._charges.pop(request)
        self._ledger.used[queue] -= tokens

    def _on_end(self, request: T, ran: bool) -> None:
        cost, started = self._costs.pop(request), self._started.pop(request, None)
        if ran and started is not None:
            self._recent.add_finished(cost, self._clock() - started)
        self._overtook.pop(request, None)
        self._squashed.discard(request)

    def _check_order(self) -> None:
        assert set(itertools.chain(*self._queues)) == set(self._waiting), "a queue has lost a request"
        assert self._charges.keys() == {*self._reserved, *self._running}, "a request is not charged"
        for queue, used in enumerate(self._ledger.used):
            held = sum(tokens for charged, tokens in self._charges.values() if charged == queue)
            assert used == held, f"queue {queue} is charged {used} tokens, its requests hold {held}"

    # Private.

    def _length(self, queue: int) -> int:
        queues = self._queues
        return len(queues[queue]) if queue < len(queues) else 0

    def _quota(self, queue: int) -> int:
        quotas = self.quotas
        return quotas[queue] if queue < len(quotas) else 0

    def _queue_of(self, request: T) -> int:
        return self._size_queues.queue_of(self._costs[request])

    def _charge(self, request: T) -> None:
        queue = self._queue_of(request)
        tokens = self._charge_of(queue, request)
        self._ledger.used[queue] += tokens
        self._charges[request] = (queue, tokens)

    def _charge_of(self, queue: int, request: T) -> int:
        """Tokens charged to the queue: at most its quota, so that every request can be admitted; 0 with one queue."""
        if len(self._queues) == 1:
            return 0
        return min(self._costs[request].charge, self._size_queues.quota[queue])

    def _next_charge(self, queue: int) -> float | None:
        request = self._next(queue)
        return None if request is None else self._charge_of(queue, request)

    def _next(self, queue: int) -> T | None:
        """The head; if it waits for memory, the first request behind it that may overtake it."""
        if queue not in self._blocked:
            return next(iter(self._queues[queue]), None)
        if not self._bypass:
            return None
        candidates = itertools.islice(self._queues[queue], 1, 1 + MAX_BYPASS_CANDIDATES)
        wait_s = self._blocked[queue][1]
        allowed_candidates = (
            request for request in candidates if request not in self._tried and self._may_overtake(request, wait_s)
        )
        return next(allowed_candidates, None)

    def _try_next(self, queue: int) -> bool:
        request = self._next(queue)
        if request is None or self._free_slots < request.rows:
            return False
        if self._try_admit(request):
            if queue in self._blocked:
                self._overtook[request] = self._blocked[queue][0]
                self.bypasses += 1
        elif queue in self._blocked:
            self._tried.add(request)
        else:
            self._blocked[queue] = (request, self._wait_s(request))
        return True

    def _may_overtake(self, request: T, wait_s: float) -> bool:
        if request in self._squashed:
            return False
        predicted_s = request.predicted_tokens * self._iteration_s
        return allowed(wait_s, math.inf, self._needed_tokens(request), predicted_s, self._spare_tokens())

    def _needed_tokens(self, request: T) -> int:
        missing = 0 if self._memory.resident(request.adapter) else self._adapter_tokens(request.adapter)
        return self._cache_tokens(request) + missing

    def _wait_s(self, head: T) -> float:
        users = collections.Counter(request.adapter for request in self._running)
        running = (
            (
                max(1, request.predicted_tokens - request.generated),
                self._whole_tokens(request)
                + (self._adapter_tokens(request.adapter) if users[request.adapter] == 1 else 0),
            )
            for request in self._running
        )
        return head_wait_s(self._needed_tokens(head) - self._spare_tokens(), running, self._iteration_s)

    def _tick(self) -> None:
        """Measure the iteration time, and rebuild the queues when it is time."""
        now = self._clock()
        with self._lock:
            if self._running and self._last_admit is not None:
                elapsed = now - self._last_admit
                self._iteration_s += (elapsed - self._iteration_s) * (_SMOOTHING if self._iteration_s else 1.0)
            self._last_admit = now if self._running else None
            if self._next_recluster is None and self._recent.count >= FIRST_CLUSTERING:
                self._next_recluster = now
            if self._next_recluster is not None and now >= self._next_recluster:
                self._next_recluster = now + self._recluster_s
                self._recluster()

    def _recluster(self) -> None:
        self._size_queues = self._recent.make_queues(self._memory.total_tokens, MAX_QUEUES)
        self._ledger = Ledger(self._size_queues.quota)
        self._queues = [ClassQueue(SloClasses(self._classes)) for _ in self._size_queues.quota]
        # In order of arrival: a queue that sees urgent requests first would not count whom later ones overtake.
        for request in sorted(self._waiting, key=lambda request: request.arrived):
            self._on_wait(request)
        for request in self._charges:
            self._charge(request)
