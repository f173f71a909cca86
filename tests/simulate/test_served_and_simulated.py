"""A router that serves and a simulated one get the same events, and take the same decisions, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.execution.request import TextRequest
from shapeshift.polymorph.router.membership import Pace
from shapeshift.polymorph.router.placement import queues
from shapeshift.polymorph.router.router import Router
from shapeshift.polymorph.router.transport import Exchange, WorkerInfo
from shapeshift.simulate import profile
from shapeshift.simulate.events import Events
from shapeshift.simulate.polymorph import SimulatedFront, Worker
from shapeshift.workloads.load import Load
from shapeshift.workloads.trace import Trace
from tests.fakes import logger

EDGES = [32, 64, 128, 512]
# Beside it, no call of this process takes any time: nothing is believed to be late.
_CALL_US = 10**12
Decision = tuple[str, list[int]]


class LoggedEvents(Events):
    """Notes what happens: arrivals, calls that start with their worker and rows, and calls that end."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Any]] = []

    def at(self, when: float, action: Callable[[Any], None], value: Any = None) -> None:
        if not isinstance(value, Worker):
            super().at(when, action, value)
            return
        rows, _ = value.calls[-1]
        self.log.append(("call", (value.name, [row.index for row in rows])))

        def end(worker: Worker) -> None:
            self.log.append(("end", worker.name))
            action(worker)

        super().at(when, end, value)


class HeldTransport:
    """Workers in this process whose calls end when the test says so."""

    timeouts = 0

    def __init__(self, bins: dict[str, int]) -> None:
        self.bins = bins
        self._started: list[Exchange] = []
        self._running: dict[str, list[tuple[Exchange, int]]] = {name: [] for name in bins}

    def workers(self) -> Sequence[str]:
        return list(self.bins)

    def serve(self) -> None: ...

    def start(self, exchange: Exchange) -> None:
        self._started.append(exchange)

    def is_exhausted(self, worker: str) -> bool:
        return False

    def close(self, timeout_s: float) -> None: ...

    def decisions(self) -> list[Decision]:
        """The calls that have been started since the last time. The first token of a text is its place."""
        calls = []
        while self._started:
            exchange = self._started.pop(0)
            texts = exchange.begin() or ()
            self._running[exchange.worker].append((exchange, len(texts)))
            calls.append((exchange.worker, [int(ids[0]) for ids in texts]))
        return calls

    def end(self, worker: str) -> None:
        """The worker answers its first call."""
        exchange, texts = self._running[worker].pop(0)
        if texts:
            exchange.answered({"EMBEDDING": np.zeros((texts, 1), np.float32)}, 1.0)
        exchange.ended(WorkerInfo(self.bins[worker], 0, 1, _CALL_US))


def joined(router: Router, transport: HeldTransport) -> None:
    """Let every worker answer its first probe, in the order of their names, and no further probe be made."""
    deadline = time.monotonic() + 60
    asked: set[str] = set()
    while len(asked) < len(transport.bins):
        asked |= {worker for worker, _ in transport.decisions()}
        assert time.monotonic() < deadline
        time.sleep(0.01)
    router.pace = replace(router.pace, min_pause_s=1e6, max_pause_s=1e6)
    for worker in sorted(transport.bins):
        transport.end(worker)
    assert router.loaded == len(transport.bins)
    assert transport.decisions() == []


@pytest.mark.parametrize("classes", [False, True], ids=["", "classes"])
@pytest.mark.parametrize("packing", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize(
    ("placement", "dispatch"),
    [
        ("partitioned", "earliest_finish"),
        ("partitioned", "multilevel"),
        ("partitioned", "intra_group"),
        ("partitioned", "inter_group"),
        ("partitioned", "bin_packing"),
        ("resident", "earliest_finish"),
    ],
)
def test_the_decisions_are_the_same(placement: str, dispatch: str, packing: bool, classes: bool) -> None:
    curve = {"lengths": [8, 512], "latency_ms": [4.0, 60.0]}
    engines = profile.engines(curve, EDGES, packing=packing)
    bins = {f"front_w{number:02d}": EDGES[number % 4] if placement == "partitioned" else 0 for number in range(9)}
    # More than the workers can bear for most of the time, so that rows wait, share calls and overtake.
    trace = Load("mmpp", rate=500.0, duration_s=1.5, lengths="long", states="0.5:0.2,3:0.1").draw(7)
    if classes:
        drawn = np.random.default_rng(1).choice(["interactive", "", "batch"], len(trace))
        trace = replace(trace, slo_class=drawn)
    parameters = {"placement": placement, "dispatch": dispatch, "slo_ms": 300, "max_queue_ms": 0, "workers": 9}
    front = profile.front(parameters, engines, EDGES, [1.0] * 4)
    log = simulated(front, engines, trace, bins)
    calls = [entry for kind, entry in log if kind == "call"]
    assert len(trace) > 400 and sum(len(rows) for _, rows in calls) == len(trace)
    assert not packing or max(len(rows) for _, rows in calls) > 1

    transport = HeldTransport(bins)
    assignment, times = queues(engines, front.settings, EDGES)
    pace = Pace(watch_s=0.01, probe_s=0.01, min_pause_s=0.0, max_pause_s=0.0, least_limit_s=1e6)
    router = Router(transport, assignment, times, front.settings, logger(), pace)
    answered: list[TextRequest] = []
    try:
        joined(router, transport)
        expected: list[Decision] = []
        for kind, entry in log:
            if kind == "call":
                expected.append(entry)
                continue
            assert transport.decisions() == expected
            expected.clear()
            if kind == "end":
                transport.end(entry)
            else:
                ids = np.full(int(trace.length[entry]), entry)
                router.submit(TextRequest([ids], answered.append, slo_class=str(trace.slo_class[entry]) or None))
        assert transport.decisions() == expected
        assert len(answered) == len(trace) and all(request.error is None for request in answered)
    finally:
        router.close(1.0)


def simulated(front: Any, engines: Any, trace: Trace, bins: dict[str, int]) -> list[tuple[str, Any]]:
    """What happens in a simulation with these workers."""
    events = LoggedEvents()
    served = SimulatedFront(events, front, engines, trace)
    for name, bin_edge in bins.items():
        served.add(name, bin_edge)

    def arrive(index: int) -> None:
        events.log.append(("arrive", index))
        served.arrive(index)

    events.run(trace.at_s, arrive)
    return events.log
