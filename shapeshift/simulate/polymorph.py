"""A discrete-event simulation of Arlo's cluster with the real policies, for more workers than one machine can run.

Requests are dispatched when they arrive and wait at their instance. An instance serves one request at a time, in a
constant time for its bin. The allocation is solved each period for the lengths of the last period.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shapeshift.polymorph.policy import autoscale, problem, replace
from shapeshift.polymorph.policy.algorithms import DISPATCHERS
from shapeshift.polymorph.policy.allocate import allocate
from shapeshift.polymorph.policy.baselines import binpacking
from shapeshift.polymorph.policy.baselines.binpacking import Packer
from shapeshift.polymorph.policy.dispatch import Rules
from shapeshift.polymorph.policy.dispatcher import Dispatcher
from shapeshift.simulate.scenario import Floats, Model, Result, Scheme


def run(model: Model, workers: int, at_s: Floats, lengths: NDArray[np.int64], scheme: Scheme) -> Result:
    """Serve the requests that arrive at `at_s` (seconds, ascending) with `lengths` tokens; see `Result`."""
    return _Cluster(model, workers, at_s, lengths, scheme).run()


@dataclass
class _Instance:
    bin: int
    free_at: float = 0.0


class _Cluster:
    def __init__(self, model: Model, workers: int, at_s: Floats, lengths: NDArray[np.int64], scheme: Scheme) -> None:
        self._model, self._scheme = model, scheme
        self._at_s, self._lengths = at_s, lengths
        self._bins = np.searchsorted(model.edges, lengths)
        self._latency = np.zeros(len(at_s))
        self._instances: dict[int, _Instance] = {}
        self._next_id = 0
        # Heaps. (time, instance): an answer; (time, order, bin): an instance that returns with this bin.
        self._answers: list[tuple[float, int]] = []
        self._returns: list[tuple[float, int, int]] = []
        self._unassigned: list[int] = []
        self._dispatcher = self._new_dispatcher()
        self._capacities = model.capacities()
        self._result = Result(self._latency, end_s=float(at_s[-1]) if len(at_s) else 0.0)
        self._fast_since = 0.0
        self._spare = 0
        for bin_index, count in enumerate(self._counts(workers, self._whole_demand())):
            for _ in range(count):
                self._add(bin_index, 0.0)
        self._record_counts(0.0)

    def run(self) -> Result:
        plan_at, scale_at = self._scheme.period_s, self._scheme.scale_s
        first = seen = 0
        last = 0.0
        for index, now in enumerate(self._at_s.tolist()):
            while min(plan_at, scale_at) <= now:
                if plan_at <= scale_at:
                    self._advance(plan_at)
                    self._plan(self._demand(first, index), plan_at)
                    first, plan_at = index, plan_at + self._scheme.period_s
                else:
                    self._advance(scale_at)
                    self._scale(self._latency[seen:index], scale_at, self._demand(first, index))
                    seen, scale_at = index, scale_at + self._scheme.scale_s
            self._advance(now)
            self._result.worker_s += (now - last) * self._size
            last = now
            self._serve(index, now)
        return self._result

    @property
    def _size(self) -> int:
        return len(self._instances) + len(self._returns)

    def _new_dispatcher(self) -> Dispatcher[int] | Packer[int]:
        dispatch = self._scheme.dispatch
        dispatcher: Dispatcher[int] | Packer[int] = DISPATCHERS[dispatch](
            self._model.edges, self._model.service_ms, Rules(dispatch)
        )
        return dispatcher

    def _serve(self, index: int, now: float) -> None:
        chosen = self._dispatcher.dispatch(int(self._lengths[index]))
        if chosen is None:
            self._unassigned.append(index)
            return
        instance = self._instances[chosen[1]]
        table = self._model.dynamic_ms
        service = self._model.service_ms[instance.bin] if table is None else table[int(self._lengths[index])]
        instance.free_at = max(now, instance.free_at) + service / 1e3
        self._latency[index] = (instance.free_at - self._at_s[index]) * 1e3
        heapq.heappush(self._answers, (instance.free_at, chosen[1]))

    def _advance(self, now: float) -> None:
        while self._answers and self._answers[0][0] <= now:
            _, number = heapq.heappop(self._answers)
            if number in self._instances:
                self._dispatcher.finish(number)
        while self._returns and self._returns[0][0] <= now:
            at, _, bin_index = heapq.heappop(self._returns)
            self._add(bin_index, at)

    def _add(self, bin_index: int, now: float) -> None:
        self._instances[self._next_id] = _Instance(bin_index, now)
        self._dispatcher.add(bin_index, self._next_id, float(self._capacities[bin_index]))
        self._next_id += 1
        unassigned, self._unassigned = self._unassigned, []
        for index in unassigned:
            self._serve(index, now)

    def _retire(self, number: int) -> _Instance:
        """Remove an instance from dispatch; it still serves the requests that wait for it."""
        self._dispatcher.remove(number)
        return self._instances.pop(number)

    def _change(self, number: int, bin_index: int, now: float) -> None:
        instance = self._retire(number)
        back = max(now, instance.free_at) + self._scheme.change_s
        heapq.heappush(self._returns, (back, self._next_id, bin_index))
        self._next_id += 1

    def _plan(self, demand: list[float], now: float) -> None:
        if self._scheme.allocation != "exact" or not sum(demand) or self._returns or not self._instances:
            return
        numbers = list(self._instances)
        have = [self._model.edges[self._instances[number].bin] for number in numbers]
        want = self._counts(len(numbers), self._with_backlog(demand))
        for place, edge in replace.changes(have, want, self._model.edges):
            self._change(numbers[place], self._model.edges.index(edge), now)
        self._record_counts(now)

    def _with_backlog(self, demand: list[float]) -> list[float]:
        """The demand plus the requests that wait at the instances, as in `sidecar.policy.plan`."""
        held = Counter(number for _, number in self._answers if number in self._instances)
        outstanding = ((self._instances[number].bin, requests) for number, requests in held.items())
        share = self._model.slo_ms / 1e3 / self._scheme.period_s
        waiting = problem.backlog(outstanding, len(demand), share, self._scheme.curve)
        return [texts + more for texts, more in zip(demand, waiting, strict=True)]

    def _scale(self, latencies: Floats, now: float, demand: list[float]) -> None:
        if not self._scheme.scaling or self._returns or not self._instances:
            return
        delta, least_busy = self._scaling(latencies, now, demand)
        if delta > 0:
            for _ in range(delta):
                back = now + self._scheme.change_s
                heapq.heappush(self._returns, (back, self._next_id, len(self._model.edges) - 1))
                self._next_id += 1
        elif delta < 0 and (
            self._model.edges[self._instances[least_busy].bin] != self._model.edges[-1] or self._has_two_longest()
        ):
            self._retire(least_busy)
        self._record_counts(now)

    def _has_two_longest(self) -> bool:
        last = len(self._model.edges) - 1
        return sum(instance.bin == last for instance in self._instances.values()) > 1

    def _scaling(self, latencies: Floats, now: float, demand: list[float]) -> tuple[int, int]:
        scheme, numbers = self._scheme, list(self._instances)
        waiting = dict.fromkeys(numbers, 0)
        for _, number in self._answers:
            if number in waiting:
                waiting[number] += 1
        least_busy = min(numbers, key=waiting.__getitem__)
        if scheme.scaling == "headroom":
            spent = sum(q * ms for q, ms in zip(demand, self._model.service_ms, strict=True))
            load = spent / self._model.slo_ms
            workers, self._spare = binpacking.scale(
                load, 1.0, len(numbers), scheme.min_workers, scheme.max_workers, self._spare
            )
            return workers - len(numbers), least_busy
        p98 = float(np.percentile(latencies, 98)) if len(latencies) else 0.0
        if p98 >= autoscale.PAPER.in_share * self._model.slo_ms:
            self._fast_since = now
        outstanding = [waiting[number] for number in numbers]
        decision = autoscale.decide(
            p98, self._model.slo_ms, now - self._fast_since, outstanding, scheme.min_workers, scheme.max_workers
        )
        if decision.action == "in":
            self._fast_since = now
        return {"out": 1, "in": -1, "keep": 0}[decision.action], least_busy

    def _counts(self, workers: int, demand: list[float]) -> Sequence[int]:
        model, scheme = self._model, self._scheme
        services = problem.of_services(workers, demand, model.service_ms, model.slo_ms, scheme.curve)
        return allocate(services, scheme.allocation).counts

    def _demand(self, first: int, last: int) -> list[float]:
        """Requests of each bin within one objective, over the arrivals [first, last)."""
        if last <= first:
            return [0.0] * len(self._model.edges)
        seconds = max(self._at_s[last - 1] - self._at_s[first], 1e-9)
        counts = np.bincount(self._bins[first:last], minlength=len(self._model.edges))
        return [float(count) for count in counts * (self._model.slo_ms / 1e3 / seconds)]

    def _whole_demand(self) -> list[float]:
        return self._demand(0, len(self._at_s))

    def _record_counts(self, now: float) -> None:
        held = [instance.bin for instance in self._instances.values()] + [bin_ for _, _, bin_ in self._returns]
        self._result.counts.append((now, tuple(held.count(index) for index in range(len(self._model.edges)))))
