"""Many adapters over one decode loop as discrete iterations, over the policies that serve.

An iteration takes as long as a linear law says of what it computes; adapters come over one link, beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shapeshift.adapter_cache import scheduling
from shapeshift.adapter_cache.interfaces import AdapterInfo
from shapeshift.adapter_cache.predict import Asked, Predictor, RunningMean
from shapeshift.adapter_cache.scheduling import SchedulingSettings
from shapeshift.simulate.adapter_pool import Caching, SimulatedPool

_QUEUE_REQUESTS, _QUEUE_TOKENS = 10**9, 10**12


@dataclass(frozen=True)
class Machine:
    """What serves.

    slots           requests that run at once
    prefill_tokens  most tokens of prompts in an iteration
    base_s, row_s, token_s, rank_s  an iteration's time: at least, for each row that decodes, for each token of a
                    prompt, and for each rank of a row's adapter
    load_bytes_s    of the link over which adapters come
    pool_bytes      of keys, values and adapters together; token_bytes: of one token's keys and values
    slot_tokens     tokens of cache that a request takes at least (where slots are contiguous: their length)
    """

    slots: int
    prefill_tokens: int
    base_s: float
    row_s: float
    token_s: float
    rank_s: float
    load_bytes_s: float
    pool_bytes: int
    token_bytes: int
    slot_tokens: int = 1


@dataclass(frozen=True)
class Ask:
    """A request: when it comes, for which adapter, how long its prompt is and its answer will be."""

    at_s: float
    adapter: str | None
    prompt_tokens: int
    answer_tokens: int


@dataclass
class Result:
    """Of the requests, in order of arrival: seconds from arrival to the first token, and to the last; all seconds
    from one token to the next; and what was loaded."""

    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    between_s: NDArray[np.float64]
    loaded_bytes: int
    hits: int
    misses: int
    squashes: int = 0
    bypasses: int = 0
    queues: list[int] = field(default_factory=list)


class _Request:
    """A request on its way; see `adapter_cache.interfaces.SizedRequest`."""

    def __init__(self, number: int, ask: Ask, rank: int, predicted: int, most: int) -> None:
        self.number = number
        self.ask = ask
        self.adapter = ask.adapter
        self.rank = rank
        self.prompt_tokens = ask.prompt_tokens
        self.max_new_tokens = most
        self.predicted_tokens = predicted
        self.generated = 0
        self.arrived = ask.at_s
        self.tokens = ask.prompt_tokens + ask.answer_tokens
        self.unread = 0
        self.first = self.last = self.previous = 0.0


def run(
    machine: Machine,
    adapters: Mapping[str, AdapterInfo],
    asks: Sequence[Ask],
    own: SchedulingSettings,
    caching: Caching,
    predictor: Predictor | None = None,
) -> Result:
    """Serve `asks`, which come in order of time, until all have ended."""
    return _Server(machine, adapters, asks, own, caching, predictor or RunningMean()).run()


class _Server:
    def __init__(
        self,
        machine: Machine,
        adapters: Mapping[str, AdapterInfo],
        asks: Sequence[Ask],
        own: SchedulingSettings,
        caching: Caching,
        predictor: Predictor,
    ) -> None:
        self._machine, self._asks, self._predictor = machine, asks, predictor
        self.pool = SimulatedPool(adapters, caching, machine.pool_bytes, machine.token_bytes, machine.load_bytes_s)

        def adapter_tokens(name: str | None) -> int:
            return 0 if name is None else -(-adapters[name].bytes // machine.token_bytes)

        self.admission = scheduling.build(
            own,
            self.pool,
            _QUEUE_REQUESTS,
            _QUEUE_TOKENS,
            adapter_tokens,
            machine.slot_tokens,
            clock=lambda: self.pool.now,
        )
        self._most = max((ask.answer_tokens for ask in asks), default=1)
        self._running: dict[_Request, None] = {}
        self._next = 0
        self._between: list[float] = []
        self._requests: list[_Request] = []

    def run(self) -> Result:
        while self._next < len(self._asks) or self._running or len(self.admission):
            self._arrive()
            self.pool.settle()
            self._admit()
            if self._running:
                self._iterate()
            else:
                self._rest()
        self.admission.check_integrity()
        self.pool.check_integrity()
        return self._result()

    def _arrive(self) -> None:
        while self._next < len(self._asks) and self._asks[self._next].at_s <= self.pool.now:
            ask = self._asks[self._next]
            asked = Asked(ask.adapter, ask.prompt_tokens, self._most, truth=ask.answer_tokens)
            predicted = self._predictor.predict(asked)
            request = _Request(self._next, ask, self.pool.rank(ask.adapter), predicted, self._most)
            self._requests.append(request)
            self.admission.submit(request)
            self._next += 1

    def _admit(self) -> None:
        for request in self.admission.squash():
            del self._running[request]
            self.pool.leave(self._held(request))
        for request in self.admission.admit(self._machine.slots - len(self._running)):
            self.pool.seat(self._held(request))
            request.unread = request.prompt_tokens + request.generated
            self._running[request] = None

    def _held(self, request: _Request) -> int:
        return max(self._machine.slot_tokens, request.tokens)

    def _iterate(self) -> None:
        """One iteration: every request that has been read gets a token, and prompts are read in their order."""
        machine = self._machine
        decoding = [one for one in self._running if not one.unread]
        budget = machine.prefill_tokens
        ranks = sum(one.rank for one in decoding)
        for request in [one for one in self._running if one.unread]:
            taken = min(budget, request.unread)
            request.unread -= taken
            budget -= taken
            if taken:
                ranks += request.rank
            if taken and not request.unread:
                decoding.append(request)
        spent = machine.prefill_tokens - budget
        took = machine.base_s + machine.row_s * len(decoding) + machine.token_s * spent + machine.rank_s * ranks
        self.pool.now += took
        for request in decoding:
            self._token(request)

    def _token(self, request: _Request) -> None:
        now = self.pool.now
        if request.generated:
            self._between.append(now - request.previous)
        else:
            request.first = now
        request.previous = now
        request.generated += 1
        if request.generated == request.ask.answer_tokens:
            request.last = now
            del self._running[request]
            self.pool.leave(self._held(request))
            self.admission.finished(request)
            ask = request.ask
            self._predictor.learn(Asked(ask.adapter, ask.prompt_tokens, self._most), request.generated)

    def _rest(self) -> None:
        """Nothing runs: go on when a request comes or an adapter is there."""
        ends = [at for at in (self.pool.next_load(),) if at is not None]
        if self._next < len(self._asks):
            ends.append(self._asks[self._next].at_s)
        assert ends or not len(self.admission), "requests wait, and nothing will ever let them in"
        if ends:
            self.pool.now = max(self.pool.now, min(ends))

    def _result(self) -> Result:
        requests, pool = self._requests, self.pool
        return Result(
            np.array([one.first - one.arrived for one in requests]),
            np.array([one.last - one.arrived for one in requests]),
            np.array(self._between),
            pool.loaded_bytes,
            pool.hits,
            pool.misses,
            getattr(self.admission, "squashes", 0),
            getattr(self.admission, "bypasses", 0),
            getattr(self.admission, "quotas", list)(),
        )
