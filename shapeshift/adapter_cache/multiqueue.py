"""Chameleon's scheduler: queues by size with quotas, so that small requests have a lane of their own (section 4.2)."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

from shapeshift.adapter_cache.admit import Ledger, first_phase, second_phase
from shapeshift.adapter_cache.bypass import allowed, head_wait_s
from shapeshift.adapter_cache.gate import Clock, Gate, Limits, T, Tokens
from shapeshift.adapter_cache.interfaces import Memory
from shapeshift.adapter_cache.lanes import Sized, Window, single

FIRST = 64
"""Requests after which the first queues are made; until then there is one."""
PEEK = 16
"""Requests behind a head that may pass it."""
_SMOOTHING = 0.1


class MultiQueue(Gate[T]):
    """Two-phase admission from queues that are made anew every `recluster_s` seconds, with bypass and squash.

    adapter_tokens(name): what its weights take, in tokens. slo_s: see `Window.lanes`. A request that passed a head
    and has not ended when it was foretold to is set aside, once, if that head still waits.
    """

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        adapter_tokens: Tokens,
        max_queues: int = 4,
        recluster_s: float = 300.0,
        slo_s: float = 0.0,
        bypass: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(memory, limits, clock)
        self._adapter_tokens = adapter_tokens
        self.most_queues = max_queues
        self._recluster_s = recluster_s
        self._slo_s = slo_s
        self._bypass = bypass
        self._window = Window()
        self._lanes = single(memory.total_tokens)
        self._ledger = Ledger(self._lanes.quota)
        self._queues: list[dict[T, None]] = [{}]
        self._next_lanes: float | None = None
        self._sizes: dict[T, Sized] = {}
        self._charges: dict[T, tuple[int, int]] = {}
        self._began: dict[T, float] = {}
        self._iteration_s = 0.0
        self._last_admit: float | None = None
        self._stuck: dict[int, tuple[T, float]] = {}
        self._tried: set[T] = set()
        self._passed: dict[T, T] = {}
        self._squashed: set[T] = set()
        self.squashes = 0
        self.bypasses = 0

    # For metrics.

    def queue_lengths(self) -> list[int]:
        """Requests that wait, by queue."""
        return [len(queue) for queue in self._queues]

    def quotas(self) -> list[int]:
        """Tokens that each queue may hold."""
        return list(self._lanes.quota)

    # What the loop calls.

    def admit(self, free: int) -> list[T]:
        self._tick()
        return super().admit(free)

    def squash(self) -> list[T]:
        with self._lock:
            self._passed = {one: head for one, head in self._passed.items() if head in self._waiting}
            late = [one for one in self._passed if one in self._running and one.generated > one.predicted_tokens]
            for request in late:
                del self._passed[request]
                self._squashed.add(request)
                self._set_aside(request)
            self.squashes += len(late)
        return late

    # What a gate asks an order for.

    def _select(self) -> None:
        self._stuck.clear()
        self._tried.clear()
        first_phase(self._ledger, self._head, self._try)
        second_phase(self._ledger, self._head, self._try, lambda queue: bool(self._queues[queue]))

    def _came(self, request: T) -> None:
        tokens = request.prompt_tokens + request.predicted_tokens
        self._sizes[request] = Sized(
            request.prompt_tokens,
            request.predicted_tokens,
            request.rank,
            max(self._limits.slot_tokens, tokens),
            self._adapter_tokens(request.adapter),
        )
        self._window.came(self._sizes[request], request.arrived)

    def _enter(self, request: T) -> None:
        self._queues[self._lanes.of(self._sizes[request])][request] = None

    def _exit(self, request: T) -> None:
        del self._queues[self._lanes.of(self._sizes[request])][request]

    def _charge(self, request: T) -> None:
        queue = self._lanes.of(self._sizes[request])
        tokens = self._tokens_of(queue, request)
        self._ledger.used[queue] += tokens
        self._charges[request] = (queue, tokens)
        self._began[request] = self._clock()

    def _refund(self, request: T) -> None:
        queue, tokens = self._charges.pop(request)
        self._ledger.used[queue] -= tokens

    def _gone(self, request: T, ran: bool) -> None:
        sized, began = self._sizes.pop(request), self._began.pop(request, None)
        if ran and began is not None:
            self._window.took(sized, self._clock() - began)
        self._passed.pop(request, None)
        self._squashed.discard(request)

    def _check(self) -> None:
        assert set(itertools.chain(*self._queues)) == self._waiting.keys(), "a queue has lost a request"
        assert self._charges.keys() == {*self._held, *self._running}, "somebody is not charged"
        for queue, used in enumerate(self._ledger.used):
            held = sum(tokens for lane, tokens in self._charges.values() if lane == queue)
            assert used == held, f"queue {queue} is charged {used} tokens, its requests hold {held}"

    # Its own.

    def _tokens_of(self, queue: int, request: T) -> int:
        """What it is charged: no more than the quota, or it could never be admitted; one queue needs no quota."""
        if len(self._queues) == 1:
            return 0
        return min(self._sizes[request].charge, self._lanes.quota[queue])

    def _head(self, queue: int) -> float | None:
        request = self._next(queue)
        return None if request is None else self._tokens_of(queue, request)

    def _next(self, queue: int) -> T | None:
        """The head; once it is known to wait for memory, the first behind it that may pass."""
        if queue not in self._stuck:
            return next(iter(self._queues[queue]), None)
        if not self._bypass:
            return None
        behind = itertools.islice(self._queues[queue], 1, 1 + PEEK)
        wait_s = self._stuck[queue][1]
        return next((one for one in behind if one not in self._tried and self._may_pass(one, wait_s)), None)

    def _try(self, queue: int) -> bool:
        request = self._next(queue)
        if request is None or self._room < 1:
            return False
        if self._take(request):
            if queue in self._stuck:
                self._passed[request] = self._stuck[queue][0]
                self.bypasses += 1
        elif queue in self._stuck:
            self._tried.add(request)
        else:
            self._stuck[queue] = (request, self._wait_s(request))
        return True

    def _may_pass(self, request: T, wait_s: float) -> bool:
        if request in self._squashed:
            return False
        predicted_s = request.predicted_tokens * self._iteration_s
        return allowed(wait_s, math.inf, self._need(request), predicted_s, self._spare_tokens())

    def _need(self, request: T) -> int:
        missing = 0 if self._memory.resident(request.adapter) else self._adapter_tokens(request.adapter)
        return self._place(request) + missing

    def _wait_s(self, head: T) -> float:
        users = Counter(one.adapter for one in self._running)
        running = (
            (
                max(1, one.predicted_tokens - one.generated),
                self._place(one) + (self._adapter_tokens(one.adapter) if users[one.adapter] == 1 else 0),
            )
            for one in self._running
        )
        return head_wait_s(self._need(head) - self._spare_tokens(), running, self._iteration_s)

    def _tick(self) -> None:
        """Follow the pace of iterations, and make new queues when it is time."""
        now = self._clock()
        with self._lock:
            if self._running and self._last_admit is not None:
                took = now - self._last_admit
                self._iteration_s += (took - self._iteration_s) * (_SMOOTHING if self._iteration_s else 1.0)
            self._last_admit = now if self._running else None
            if self._next_lanes is None and self._window.seen >= FIRST:
                self._next_lanes = now
            if self._next_lanes is not None and now >= self._next_lanes:
                self._next_lanes = now + self._recluster_s
                self._remake()

    def _remake(self) -> None:
        self._lanes = self._window.lanes(self._memory.total_tokens, self.most_queues, self._slo_s)
        self._ledger = Ledger(self._lanes.quota)
        self._queues = [{} for _ in self._lanes.quota]
        for request in self._waiting:
            self._enter(request)
        for request in self._charges:
            queue = self._lanes.of(self._sizes[request])
            tokens = self._tokens_of(queue, request)
            self._ledger.used[queue] += tokens
            self._charges[request] = (queue, tokens)
