"""What all schedulers share (queue limits, memory, pending adapter loads, a bound on overtaking), and arrival order."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from shapeshift.adapter_cache.policy.scheduling import SchedulerInputs, SizedRequest
from shapeshift.fused_decode.policy.admission import Admission, always, displaced, nothing
from shapeshift.serving.bounds import Bound, ClassQueue, SloClasses, unloading
from shapeshift.serving.metrics import Metric

T = TypeVar("T", bound=SizedRequest)

PATIENCE = 2.0
"""See `OvertakingBound`."""
PRELOAD = 2
"""Requests whose adapters are loaded while no slot is free, if the memory has space that is not in slots."""


class OvertakingBound(Generic[T]):
    """Bounds how many requests may overtake one that waits, whatever the order.

    A request is due once `patience` times as many requests have been admitted since its arrival as were waiting or
    running then. The bound counts admissions, so it holds at any speed; arrival order needs a patience of 1.
    """

    def __init__(self, patience: float) -> None:
        """patience: 0 disables the bound."""
        self.admissions = 0
        self._patience = patience
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()

    def add(self, request: T, before: int) -> None:
        """`request` starts to wait behind `before` waiting or running requests."""
        if self._patience:
            due = self.admissions + self._patience * before
            heapq.heappush(self._heap, (due, next(self._numbers), request))

    def due(self, waiting: ClassQueue[T]) -> T | None:
        """The request among `waiting` that has been due for longest."""
        while self._heap and self._heap[0][2] not in waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap and self._heap[0][0] <= self.admissions else None


class AdmissionBase(Admission[T]):
    """A scheduler without an order: subclasses implement `_select`.

    A request is waiting, reserved (its slots and tokens are kept for it while its adapter loads) or running. A due
    request goes before all others; while it cannot be admitted, no other request is.
    """

    def __init__(self, inputs: SchedulerInputs, patience: float) -> None:
        """patience: see `OvertakingBound`."""
        self._memory = inputs.memory
        self._clock = inputs.clock
        self._block_tokens = inputs.block_tokens
        self._bound = Bound("queue_requests", inputs.queue_requests, "requests")
        self._overtaking: OvertakingBound[T] = OvertakingBound(patience)
        self._waiting: ClassQueue[T] = ClassQueue(SloClasses(inputs.classes))
        self._reserved: dict[T, None] = {}
        self._running: dict[T, None] = {}
        # Of the current call of `admit`.
        self._admitted: list[T] = []
        self._free_slots = 0
        self._shared: Callable[[T], int] = nothing
        self._tokens: dict[T, int] = {}
        self._closed = False
        self._lock = threading.Lock()

    # The order, implemented by subclasses. All are called with the lock held.

    @abstractmethod
    def _select(self) -> None:
        """Call `_try_admit` for waiting requests in the scheduler's order while there is capacity."""

    def _passed_over(self) -> Iterable[T]:
        """The waiting requests that come before the one that `_try_admit` is asked for."""
        return ()

    def _on_submit(self, request: T) -> None:
        """`request` has just been submitted; `_on_wait` follows."""

    def _on_wait(self, request: T) -> None:
        """`request` joins the waiting requests."""

    def _on_leave(self, request: T, admitted: bool) -> None:
        """`request` leaves the waiting requests. admitted: False for one that is withdrawn."""

    def _on_charge(self, request: T) -> None:
        """`request` is reserved or running from now on."""

    def _on_refund(self, request: T) -> None:
        """`request` is no longer reserved or running."""

    def _on_end(self, request: T, ran: bool) -> None:
        """`request` has left for good; ran: whether it held a slot."""

    def _check_order(self) -> None:
        """Raise AssertionError if the counts of the subclass are wrong."""

    # The admission protocol.

    def __len__(self) -> int:
        return len(self._waiting) + len(self._reserved)

    def refuse_when_full(self, slo_class: str | None = None) -> None:
        if self._closed:
            raise unloading()
        with self._lock:
            displaced(self._bound, len(self), self._waiting, slo_class)

    def submit(self, request: T) -> T | None:
        with self._lock:
            if self._closed:
                raise unloading()
            last = displaced(self._bound, len(self), self._waiting, request.slo_class)
            if last is not None:
                self._withdraw(last)
            self._overtaking.add(request, len(self) + len(self._running))
            self._on_submit(request)
            self._start_waiting(request)
        return last

    def admit(self, free: int, fits: Callable[[T], bool] = always, shared: Callable[[T], int] = nothing) -> list[T]:
        """See `Admission`. Asks `scheduling.AdapterMemory` instead of `fits`."""
        with self._lock:
            self._admitted = []
            self._shared, self._tokens = shared, {}
            self._admit_reserved()
            self._free_slots = free - sum(request.rows for request in (*self._admitted, *self._reserved))
            if self._admit_due():
                self._select()
            return self._admitted

    def preempted(self, request: T) -> None:
        with self._lock:
            self._squash(request)

    def withdraw(self, request: T) -> bool:
        with self._lock:
            return self._withdraw(request)

    def finished(self, request: T) -> None:
        with self._lock:
            # One that was squashed while a step was in flight may have lost its place to a more urgent one, and ended.
            if request in self._running:
                self._stop_running(request)
                self._on_end(request, ran=True)

    def close(self) -> list[T]:
        with self._lock:
            self._closed = True
            left = sorted([*self._waiting, *self._reserved], key=lambda request: request.arrived)
        for request in left:
            self.withdraw(request)
        return left

    def metrics(self) -> Sequence[Metric]:
        return self._waiting.classes.metrics()

    def check_integrity(self) -> None:
        with self._lock:
            queued = [*self._waiting, *self._reserved]
            assert len({*queued, *self._running}) == len(queued) + len(self._running), "a request has two states"
            self._check_order()

    # For subclasses.

    def _spare_tokens(self) -> float:
        """Tokens of KV cache that are not reserved; infinite while no request is reserved or running."""
        if not self._running and not self._reserved:
            return math.inf
        return self._memory.free_tokens - self._reserved_tokens()

    def _reserved_tokens(self) -> int:
        """Tokens of KV cache of the requests that get their slots next."""
        return sum(map(self._cache_tokens, self._admitted)) + sum(map(self._cache_tokens, self._reserved))

    def _cache_tokens(self, request: T) -> int:
        """Tokens of KV cache that `request`, which has no slot, takes at most beside what running ones have."""
        if request not in self._tokens:
            self._tokens[request] = self._whole_tokens(request) - self._shared(request)
        return self._tokens[request]

    def _whole_tokens(self, request: T) -> int:
        """Tokens of KV cache that `request` takes at most."""
        return request.rows * self._in_blocks(-(-request.tokens // request.rows))

    def _in_blocks(self, tokens: int) -> int:
        """So many tokens, rounded up to whole blocks."""
        return -(-tokens // self._block_tokens) * self._block_tokens

    def _try_admit(self, request: T, reserve: bool = True) -> bool:
        """Admit `request`, or reserve its slots while its adapter loads; returns whether either was possible.

        reserve: False leaves the request waiting while its adapter loads.
        """
        if self._free_slots < request.rows or self._cache_tokens(request) > self._spare_tokens():
            return False
        ready = self._acquire(request, self._reserved_tokens())
        if not ready and (
            self._memory.resident(request.adapter) or not self._start_load(request, self._passed_over()) or not reserve
        ):
            return False
        self._free_slots -= request.rows
        self._overtaking.admissions += 1
        self._waiting.start(request)
        self._on_leave(request, admitted=True)
        self._on_charge(request)
        if ready:
            self._start_running(request)
        else:
            self._reserved[request] = None
        return True

    def _start_load(self, request: T, earlier: Iterable[T]) -> bool:
        """Start to load the adapter of `request`; False if it does not fit beside all that is reserved.

        No adapter goes for it that a reserved request, or one of the `earlier` ones that wait, needs: these would load
        it again at once.
        """
        reserved = self._reserved_tokens() + self._cache_tokens(request)
        spared = {one.adapter for one in (*self._reserved, *earlier) if one.adapter is not None}
        return request.adapter is None or self._memory.start_load(request.adapter, reserved, spared)

    def _squash(self, request: T) -> None:
        """Move a running request back to its old place among the waiting ones."""
        self._stop_running(request)
        self._overtaking.add(request, len(self) + len(self._running))
        self._start_waiting(request)

    # Private.

    def _withdraw(self, request: T) -> bool:
        if request in self._reserved:
            del self._reserved[request]
            self._on_refund(request)
        elif self._waiting.remove(request):
            self._on_leave(request, admitted=False)
        else:
            return False
        self._memory.unqueued(request.adapter)
        self._on_end(request, ran=False)
        return True

    def _acquire(self, request: T, reserved_tokens: int) -> bool:
        """Use the adapter of `request`; False if it is not resident or too little KV cache would be left."""
        alone = not self._running and self._reserved.keys() <= {request}
        tokens = 0 if alone else self._cache_tokens(request) + reserved_tokens
        return self._memory.acquire(request.adapter, tokens)

    def _start_waiting(self, request: T) -> None:
        self._waiting.add(request)
        self._memory.queued(request.adapter)
        self._on_wait(request)

    def _start_running(self, request: T) -> None:
        self._memory.unqueued(request.adapter)
        self._running[request] = None
        self._admitted.append(request)

    def _stop_running(self, request: T) -> None:
        del self._running[request]
        self._memory.release(request.adapter)
        self._on_refund(request)

    def _admit_reserved(self) -> None:
        for request in list(self._reserved):
            if self._acquire(request, sum(map(self._cache_tokens, self._admitted))):
                del self._reserved[request]
                self._start_running(request)
        # Only after the loop: a further load may evict an adapter that has just been loaded and is not in use yet.
        earlier: list[str] = []
        for request in self._reserved:
            assert request.adapter is not None
            self._memory.start_load(request.adapter, self._reserved_tokens(), earlier)
            earlier.append(request.adapter)

    def _admit_due(self) -> bool:
        """Admit the due requests; False if one of them, and so every other request, has to wait."""
        while (request := self._overtaking.due(self._waiting)) is not None:
            if not self._try_admit(request):
                return False
        return True


class ArrivalOrder(AdmissionBase[T]):
    """In order of class and arrival. A request whose adapter loads keeps its slot; those behind it get theirs.

    The adapters of the next requests are loaded early, as far as all of them fit.
    """

    _blocking = False

    def __init__(self, inputs: SchedulerInputs) -> None:
        super().__init__(inputs, patience=0.0)

    def _select(self) -> None:
        for request in list(itertools.islice(self._waiting, self._free_slots)):
            if not self._try_admit(request, reserve=not self._blocking):
                break
        spare = self._spare_tokens()
        upcoming = list(itertools.islice(self._waiting, max(self._free_slots, PRELOAD)))
        for place, request in enumerate(upcoming):
            spare -= self._cache_tokens(request)
            if spare < 0 or not self._start_load(request, upcoming[:place]):
                break


class BlockingArrivalOrder(ArrivalOrder[T]):
    """In order of class and arrival. No request overtakes one whose adapter loads (S-LoRA)."""

    _blocking = True
