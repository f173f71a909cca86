"""A discrete simulation of one decode loop with many adapters, which runs the policies of the server.

The time of an iteration is a linear function of its work. Adapters are loaded over one link, beside the iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.adapter_cache.policy.length_prediction import LengthPredictor, PredictionInput, RunningMean
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo, SchedulerInputs
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.simulate.adapter_pool import CacheOptions, SimulatedPool

_QUEUE_REQUESTS = 10**9

MakeScheduler = Callable[[SchedulerInputs], Admission[Any]]
"""One of `adapter_cache.settings.SCHEDULERS`."""


@dataclass(frozen=True)
class Machine:
    """The simulated hardware.

    slots           maximum number of running requests
    prefill_tokens  maximum prompt tokens in an iteration
    base_s, row_s, token_s, rank_s  time of an iteration: constant, per decoding row, per prompt token, and per rank of
                    each row's adapter
    load_bytes_s    bandwidth of the link that loads adapters
    pool_bytes      memory of keys, values and adapters together
    token_bytes     memory of the keys and values of one token
    slot_tokens     tokens of KV cache that a request takes at least (for contiguous slots: their length)
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
class SimulatedRequest:
    """One request of the trace: arrival, adapter, and the lengths of prompt and answer."""

    at_s: float
    adapter: str | None
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class SimulationResult:
    """What one run measured.

    first_s, last_s  seconds from arrival to the first and to the last token, by request in order of arrival
    between_s        seconds between consecutive tokens, of all requests
    """

    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    between_s: NDArray[np.float64]
    loaded_bytes: int
    hits: int
    misses: int


class _Request:
    """A request in the simulated loop; see `adapter_cache.policy.scheduling.SizedRequest`."""

    def __init__(self, traced: SimulatedRequest, rank: int, predicted: int) -> None:
        self.traced = traced
        self.adapter = traced.adapter
        self.rank = rank
        self.rows = 1
        self.slo_class: str | None = None
        self.prompt_tokens = traced.prompt_tokens
        self.predicted_tokens = predicted
        self.generated = 0
        self.arrived = traced.at_s
        self.tokens = traced.prompt_tokens + traced.answer_tokens
        self.unread_tokens = 0
        self.first = self.last = self.previous = 0.0


def run(
    machine: Machine,
    adapters: Mapping[str, AdapterInfo],
    requests: Sequence[SimulatedRequest],
    scheduler: MakeScheduler,
    options: CacheOptions,
    predictor: LengthPredictor | None = None,
) -> SimulationResult:
    """Serve `requests`, which are in order of arrival, to the end."""
    longest = max((traced.answer_tokens for traced in requests), default=1)
    server = SimulatedServer(machine, adapters, scheduler, options, longest, predictor)
    for traced in requests:
        server.offer(traced)
    return server.run()


class SimulatedServer:
    """Serves what is offered to it, in order of arrival. max_new_tokens: of the longest answer that there may be."""

    def __init__(
        self,
        machine: Machine,
        adapters: Mapping[str, AdapterInfo],
        scheduler: MakeScheduler,
        options: CacheOptions,
        max_new_tokens: int,
        predictor: LengthPredictor | None = None,
    ) -> None:
        self._machine, self._predictor = machine, predictor or RunningMean()
        self._trace: list[SimulatedRequest] = []
        self.pool = SimulatedPool(adapters, options, machine.pool_bytes, machine.token_bytes, machine.load_bytes_s)

        def adapter_tokens(name: str | None) -> int:
            return 0 if name is None else -(-adapters[name].bytes // machine.token_bytes)

        self.admission = scheduler(
            SchedulerInputs(
                self.pool, _QUEUE_REQUESTS, adapter_tokens, machine.slot_tokens, clock=lambda: self.pool.now
            )
        )
        self._max_new_tokens = max_new_tokens
        self._running: dict[_Request, None] = {}
        self._next = 0
        self._between: list[float] = []
        self._unanswered: dict[_Request, None] = {}
        self._requests: list[_Request] = []

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return len(self._trace) - self._next + len(self.admission) + len(self._running)

    @property
    def unread_tokens(self) -> int:
        """Prompt tokens to be computed before every request here has its first token."""
        tokens = sum(traced.prompt_tokens for traced in self._trace[self._next :])
        return tokens + sum(
            one.unread_tokens if one in self._running else one.prompt_tokens for one in self._unanswered
        )

    def offer(self, traced: SimulatedRequest) -> None:
        """Serve a request, which arrives after those before it."""
        self._trace.append(traced)

    def advance(self, until_s: float = math.inf) -> None:
        """Go on until all is served, or for iterations that begin before `until_s`."""
        while self.load and self.pool.now < until_s:
            self._arrive()
            self.pool.end_loads()
            self._admit()
            if self._running:
                self._iterate()
            else:
                self._skip_idle_time(until_s)

    def run(self) -> SimulationResult:
        """Serve what was offered to the end."""
        self.advance()
        self.admission.check_integrity()
        self.pool.check_integrity()
        return self._result()

    def _arrive(self) -> None:
        while self._next < len(self._trace) and self._trace[self._next].at_s <= self.pool.now:
            traced = self._trace[self._next]
            inputs = PredictionInput(
                traced.adapter, traced.prompt_tokens, self._max_new_tokens, truth=traced.answer_tokens
            )
            predicted = self._predictor.predict(inputs)
            request = _Request(traced, self.pool.rank(traced.adapter), predicted)
            self._requests.append(request)
            self._unanswered[request] = None
            self.admission.submit(request)
            self._next += 1

    def _admit(self) -> None:
        for request in self.admission.squash():
            del self._running[request]
            self.pool.leave(self._cache_tokens(request))
        for request in self.admission.admit(self._machine.slots - len(self._running)):
            self.pool.take(self._cache_tokens(request))
            request.unread_tokens = request.prompt_tokens + request.generated
            self._running[request] = None

    def _cache_tokens(self, request: _Request) -> int:
        return max(self._machine.slot_tokens, request.tokens)

    def _iterate(self) -> None:
        """One iteration: every decoding request gets a token, and prompts are prefilled in order."""
        machine = self._machine
        decoding = [one for one in self._running if not one.unread_tokens]
        budget = machine.prefill_tokens
        ranks = sum(one.rank for one in decoding)
        for request in [one for one in self._running if one.unread_tokens]:
            taken = min(budget, request.unread_tokens)
            request.unread_tokens -= taken
            budget -= taken
            if taken:
                ranks += request.rank
            if taken and not request.unread_tokens:
                decoding.append(request)
        prefilled = machine.prefill_tokens - budget
        self.pool.now += (
            machine.base_s + machine.row_s * len(decoding) + machine.token_s * prefilled + machine.rank_s * ranks
        )
        for request in decoding:
            self._add_token(request)

    def _add_token(self, request: _Request) -> None:
        now = self.pool.now
        if request.generated:
            self._between.append(now - request.previous)
        else:
            request.first = now
            del self._unanswered[request]
        request.previous = now
        request.generated += 1
        if request.generated == request.traced.answer_tokens:
            request.last = now
            del self._running[request]
            self.pool.leave(self._cache_tokens(request))
            self.admission.finished(request)
            inputs = PredictionInput(request.adapter, request.prompt_tokens, self._max_new_tokens)
            self._predictor.learn(inputs, request.generated)

    def _skip_idle_time(self, until_s: float) -> None:
        """Go to the next arrival or end of a load, at most to `until_s`."""
        events = [at for at in (self.pool.next_load(),) if at is not None]
        if self._next < len(self._trace):
            events.append(self._trace[self._next].at_s)
        assert events or not len(self.admission), "requests wait that can never be admitted"
        if events:
            self.pool.now = max(self.pool.now, min(*events, until_s))

    def _result(self) -> SimulationResult:
        requests, pool = self._requests, self.pool
        return SimulationResult(
            np.array([one.first - one.arrived for one in requests]),
            np.array([one.last - one.arrived for one in requests]),
            np.array(self._between),
            pool.loaded_bytes,
            pool.hits,
            pool.misses,
        )
