"""One decode loop with many adapters as discrete events, under the policies that serve.

The time of an iteration is a linear function of its work. Adapters are loaded over one link, beside the iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.adapter_cache.policy.length_prediction import LengthPredictor, PredictionInput, RunningMean
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo, SchedulerInputs
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.simulate.adapter_pool import CacheOptions, SimulatedPool
from shapeshift.simulate.events import Events, Progress

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
    progress: Progress | None = None,
) -> SimulationResult:
    """Serve `requests`, which are in order of arrival, to the end."""
    return _Loop(machine, adapters, requests, scheduler, options, predictor or RunningMean()).run(progress)


class _Loop:
    """The decode loop: iterations follow one another while requests run, and end where only loads are waited for."""

    def __init__(
        self,
        machine: Machine,
        adapters: Mapping[str, AdapterInfo],
        trace: Sequence[SimulatedRequest],
        scheduler: MakeScheduler,
        options: CacheOptions,
        predictor: LengthPredictor,
    ) -> None:
        self._machine, self._predictor, self._trace = machine, predictor, trace
        self._events = Events()
        self._pool = SimulatedPool(
            self._events, adapters, options, machine.pool_bytes, machine.token_bytes, machine.load_bytes_s
        )

        def adapter_tokens(name: str | None) -> int:
            return 0 if name is None else -(-adapters[name].bytes // machine.token_bytes)

        self._admission = scheduler(
            SchedulerInputs(
                self._pool, _QUEUE_REQUESTS, adapter_tokens, machine.slot_tokens, clock=lambda: self._events.now
            )
        )
        self._max_new_tokens = max((traced.answer_tokens for traced in trace), default=1)
        self._running: dict[_Request, None] = {}
        self._iterates = False
        self._between: list[float] = []
        self._requests: list[_Request] = []

    def run(self, progress: Progress | None) -> SimulationResult:
        """Serve everything to the end."""
        self._events.run(np.array([traced.at_s for traced in self._trace]), self._arrive, progress)
        assert not len(self._admission), "requests wait that can never be admitted"
        self._admission.check_integrity()
        self._pool.check_integrity()
        return self._result()

    def _arrive(self, index: int) -> None:
        traced = self._trace[index]
        self._pool.end_loads()
        inputs = PredictionInput(traced.adapter, traced.prompt_tokens, self._max_new_tokens, truth=traced.answer_tokens)
        request = _Request(traced, self._pool.rank(traced.adapter), self._predictor.predict(inputs))
        self._requests.append(request)
        self._admission.submit(request)
        if not self._iterates:
            self._iterates = True
            self._events.at(self._events.now, self._iterate)

    def _iterate(self, _: None) -> None:
        """Begin an iteration; without a request that runs, wait for the adapter that is being loaded."""
        self._pool.end_loads()
        self._admit()
        loaded_at = self._pool.next_load()
        self._iterates = bool(self._running) or loaded_at is not None
        if self._running:
            self._compute()
        elif loaded_at is not None:
            self._events.at(loaded_at, self._iterate)

    def _admit(self) -> None:
        for request in self._admission.squash():
            del self._running[request]
            self._pool.leave(self._cache_tokens(request))
        for request in self._admission.admit(self._machine.slots - len(self._running)):
            self._pool.take(self._cache_tokens(request))
            request.unread_tokens = request.prompt_tokens + request.generated
            self._running[request] = None

    def _cache_tokens(self, request: _Request) -> int:
        return max(self._machine.slot_tokens, request.tokens)

    def _compute(self) -> None:
        """Every decoding request gets a token, and prompts are prefilled in order."""
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
        took_s = machine.base_s + machine.row_s * len(decoding) + machine.token_s * prefilled + machine.rank_s * ranks
        self._events.at(self._events.now + took_s, self._computed, decoding)

    def _computed(self, decoding: Sequence[_Request]) -> None:
        for request in decoding:
            self._add_token(request)
        # What has arrived by now takes part in the next one.
        self._events.at(self._events.now, self._iterate)

    def _add_token(self, request: _Request) -> None:
        now = self._events.now
        if request.generated:
            self._between.append(now - request.previous)
        else:
            request.first = now
        request.previous = now
        request.generated += 1
        if request.generated == request.traced.answer_tokens:
            request.last = now
            del self._running[request]
            self._pool.leave(self._cache_tokens(request))
            self._admission.finished(request)
            inputs = PredictionInput(request.adapter, request.prompt_tokens, self._max_new_tokens)
            self._predictor.learn(inputs, request.generated)

    def _result(self) -> SimulationResult:
        requests, pool = self._requests, self._pool
        return SimulationResult(
            np.array([one.first - one.arrived for one in requests]),
            np.array([one.last - one.arrived for one in requests]),
            np.array(self._between),
            pool.loaded_bytes,
            pool.hits,
            pool.misses,
        )
