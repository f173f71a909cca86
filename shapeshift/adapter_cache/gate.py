"""What all orders of admission share: bounds, memory, loads that are waited for, and a promise to who waits."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shapeshift.adapter_cache.interfaces import Memory, SizedRequest
from shapeshift.adapter_cache.promise import Promise
from shapeshift.errors import OverloadedError
from shapeshift.fused_decode.admission import CLOSED, Admission, Bounds

T = TypeVar("T", bound=SizedRequest)
Clock = Callable[[], float]
Tokens = Callable[[str | None], int]


@dataclass(frozen=True)
class Limits(Bounds):
    """patience: see `Promise`, 0: none; slot_tokens: tokens of cache that a request takes at least."""

    patience: float = 2.0
    slot_tokens: int = 1


class Gate(Admission[T]):
    """Requests that wait, that are held (a slot and tokens are kept for them while their adapters load), and that run.

    Who is due by the promise goes before all others, whatever the order, and stops the line where it cannot be
    admitted yet. `memory` is called with the lock held, so it must not call back.
    """

    def __init__(self, memory: Memory, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._memory = memory
        self._limits = limits
        self._clock = clock
        self._waiting: dict[T, None] = {}
        self._held: dict[T, None] = {}
        self._running: dict[T, None] = {}
        self._tokens = 0
        self._promise: Promise[T] = Promise(limits.patience)
        # Of the `admit` that is under way.
        self._chosen: list[T] = []
        self._room = 0
        self._closed = False
        self._lock = threading.Lock()

    # What an order decides.

    @abstractmethod
    def _select(self) -> None:
        """Admit whom the order wants with `_take`, while there is room."""

    def _came(self, request: T) -> None:
        """`request` has just been submitted; `_enter` follows."""

    def _enter(self, request: T) -> None:
        """`request` waits from now on."""

    def _exit(self, request: T) -> None:
        """`request` waits no longer."""

    def _charge(self, request: T) -> None:
        """`request` is held or runs from now on."""

    def _refund(self, request: T) -> None:
        """`request` is neither held nor runs any longer."""

    def _gone(self, request: T, ran: bool) -> None:
        """`request` has left for good; ran: whether from a slot."""

    # What the loop and the front call.

    def __len__(self) -> int:
        return len(self._waiting) + len(self._held)

    def refuse_when_full(self) -> None:
        if self._closed:
            raise OverloadedError(CLOSED)
        self._limits.require_place(len(self))

    def submit(self, request: T) -> None:
        with self._lock:
            self.refuse_when_full()
            self._limits.require_tokens(self._tokens, request.tokens)
            self._promise.give(request, len(self) + len(self._running))
            self._came(request)
            self._wait(request)

    def admit(self, free: int) -> list[T]:
        with self._lock:
            self._chosen = []
            self._seat_held()
            self._room = free - len(self._chosen) - len(self._held)
            if self._serve_due():
                self._select()
            return self._chosen

    def withdraw(self, request: T) -> bool:
        with self._lock:
            if request in self._held:
                del self._held[request]
                self._refund(request)
            elif request in self._waiting:
                self._wait_no_longer(request)
            else:
                return False
            self._memory.unqueued(request.adapter)
            self._tokens -= request.tokens
            self._gone(request, ran=False)
        return True

    def finished(self, request: T) -> None:
        with self._lock:
            self._stop(request)
            self._gone(request, ran=True)

    def close(self) -> list[T]:
        with self._lock:
            self._closed = True
            left = sorted([*self._waiting, *self._held], key=lambda one: one.arrived)
        for request in left:
            self.withdraw(request)
        return left

    def check_integrity(self) -> None:
        with self._lock:
            waiting = [*self._waiting, *self._held]
            assert self._tokens == sum(request.tokens for request in waiting), "the token count is off"
            assert len({*waiting, *self._running}) == len(waiting) + len(self._running), "a request is in two places"
            self._check()

    def _check(self) -> None:
        """Raise AssertionError when the order's own counts are off."""

    # For orders.

    def _spare_tokens(self) -> float:
        """Tokens of cache that nobody has been promised; without limit for the first of all."""
        if not self._running and not self._held:
            return math.inf
        return self._memory.free_tokens - self._promised()

    def _promised(self) -> int:
        """Tokens of cache of those who are about to get their slots."""
        return sum(map(self._place, self._chosen)) + sum(map(self._place, self._held))

    def _place(self, request: T) -> int:
        """Tokens of cache that it takes."""
        return max(self._limits.slot_tokens, request.tokens)

    def _take(self, request: T, hold: bool = True) -> bool:
        """Admit `request`, or hold it while its adapter loads; False where neither can be now.

        hold: False leaves it waiting while its adapter loads.
        """
        if self._room < 1 or self._place(request) > self._spare_tokens():
            return False
        ready = self._acquire(request, self._promised())
        if not ready and (self._memory.resident(request.adapter) or not self._begin_load(request) or not hold):
            return False
        self._room -= 1
        self._promise.admissions += 1
        self._wait_no_longer(request)
        self._charge(request)
        if ready:
            self._run(request)
        else:
            self._held[request] = None
        return True

    def _acquire(self, request: T, beside: int) -> bool:
        """Use its adapter; False where that is not there, or an idle one that would leave no room for the request.

        beside: tokens of cache that others have been promised.
        """
        alone = not self._running and not self._held
        return self._memory.acquire(request.adapter, 0 if alone else self._place(request) + beside)

    def _begin_load(self, request: T) -> bool:
        """Let the adapter of `request` come; False where it cannot be held beside all that is promised."""
        beside = self._promised() + self._place(request)
        return request.adapter is None or self._memory.want(request.adapter, beside)

    def _set_aside(self, request: T) -> None:
        """A running request waits again, where it would have waited all along."""
        self._stop(request)
        self._promise.give(request, len(self) + len(self._running))
        later = [one for one in self._waiting if one.arrived > request.arrived]
        for one in later:
            self._wait_no_longer(one)
        self._wait(request)
        for one in later:
            self._waiting[one] = None
            self._enter(one)

    # Its own.

    def _wait(self, request: T) -> None:
        self._waiting[request] = None
        self._tokens += request.tokens
        self._memory.queued(request.adapter)
        self._enter(request)

    def _wait_no_longer(self, request: T) -> None:
        del self._waiting[request]
        self._exit(request)

    def _run(self, request: T) -> None:
        self._memory.unqueued(request.adapter)
        self._tokens -= request.tokens
        self._running[request] = None
        self._chosen.append(request)

    def _stop(self, request: T) -> None:
        del self._running[request]
        self._memory.release(request.adapter)
        self._refund(request)

    def _seat_held(self) -> None:
        for request in list(self._held):
            if self._acquire(request, sum(map(self._place, self._chosen))):
                del self._held[request]
                self._run(request)
        # Only now: a load that goes on may evict what has just been loaded and not yet been used.
        for request in self._held:
            assert request.adapter is not None
            self._memory.want(request.adapter, self._promised())

    def _serve_due(self) -> bool:
        """Admit whom the promise puts first; False where one of them has to wait, and all others with it."""
        while (request := self._promise.due(self._waiting)) is not None:
            if not self._take(request):
                return False
        return True
