"""The sidecar as discrete events: its own decisions over a simulated front, applied in its batches of moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shapeshift.engines.manifest import Manifest
from shapeshift.polymorph.policy.baselines import binpacking
from shapeshift.polymorph.settings import worker_name
from shapeshift.serving.metrics import LENGTH_STEP
from shapeshift.settings import require
from shapeshift.sidecar.front_config import ALL_BINS, Front
from shapeshift.sidecar.observe import TAIL_QUANTILE, Traffic
from shapeshift.sidecar.policy import decide
from shapeshift.sidecar.policy.moves import Action, batches, under_load
from shapeshift.sidecar.policy.spare import in_order
from shapeshift.simulate.events import Events, Progress
from shapeshift.simulate.polymorph import Call, SimulatedFront
from shapeshift.triton.names import qualified, split
from shapeshift.workloads.trace import Trace

# Between two looks of the sidecar at what is due, seconds.
_LOOK_S = 1.0


@dataclass(frozen=True)
class Pace:
    """How fast the simulated sidecar and its workers are.

    plan_period_s  seconds between two plans; 0: the first plan stays
    change_s       seconds from the load of a worker, or the end of its last call, until it serves
    recovery_s     seconds from the death of a worker until it serves again
    overhead_ms    time of each text beside wait and engine: network, reading, answering
    scaling        how the number of workers follows the load: target, as the sidecar does it where max_workers is more
                   than min_workers, or headroom, as INFaaS does for each bin
    kill_s         when the worker with the most to do dies; 0: never
    leave_s        when the last node leaves; 0: never
    """

    plan_period_s: float = 120.0
    change_s: float = 1.0
    recovery_s: float = 5.0
    overhead_ms: float = 0.0
    scaling: str = "target"
    kill_s: float = 0.0
    leave_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("plan_period_s", "change_s", "recovery_s", "overhead_ms", "kill_s", "leave_s"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(self.scaling in ("target", "headroom"), "scaling", self.scaling, "target or headroom")


@dataclass(frozen=True)
class Served:
    """What became of a trace.

    latency_ms  of each text, nan without an answer
    outcome     of each text, an index of `polymorph.OUTCOMES`
    plans       (seconds, workers by bin, reason) of each plan, the first one at 0
    sizes       (seconds, workers) whenever their number changed
    end_s       arrival of the last text
    """

    latency_ms: NDArray[np.float64]
    outcome: NDArray[np.uint8]
    plans: Sequence[tuple[float, tuple[int, ...], str]] = field(default=())
    sizes: Sequence[tuple[float, int]] = field(default=())
    end_s: float = 0.0

    @property
    def mean_workers(self) -> float:
        """Over the time until the last arrival."""
        until = [at for at, _ in self.sizes[1:]] + [self.end_s]
        spent = sum((end - at) * count for (at, count), end in zip(self.sizes, until, strict=True) if end > at)
        return spent / self.end_s if self.end_s else 0.0


class Planner:
    """Serves a trace by a front, its workers and its sidecar. front.models: the front's model on each node.

    events  the clock
    served  the front
    bins    the bin that each worker holds, or will hold when its load has ended
    moved   how often each worker was given another one
    plans   see `Served`
    """

    def __init__(self, front: Front, engines: Manifest, trace: Trace, pace: Pace | None = None) -> None:
        self.front, self._trace, self.pace = front, trace, pace or Pace()
        self.events = Events()
        self.served = SimulatedFront(self.events, front, engines, trace, self.pace.overhead_ms)
        nodes = len(front.models)
        numbers = range(-(-max(front.max_workers, front.workers) // nodes))
        self._names = [
            qualified(split(model)[0], worker_name(front.name, number)) for number in numbers for model in front.models
        ]
        self.bins: dict[str, int] = {}
        self.moved: Counter[str] = Counter()
        # The batches of moves that are still to come, and when the present periods began.
        self._rest: Iterator[list[Action]] | None = None
        self._is_plan = False
        self._plan_from = self._scale_from = 0.0
        self._fast_since: float | None = None
        self._spare_since: dict[int, int] = {}
        self.plans: list[tuple[float, tuple[int, ...], str]] = []
        self._sizes: list[tuple[float, int]] = []
        # Since the number of workers was last looked at.
        self._ended: list[Call] = []

    def run(self, progress: Progress | None = None) -> Served:
        """Serve the trace to the end."""
        self._start()
        self.events.run(self._trace.at_s, self.served.arrive, progress)
        end_s = float(self._trace.at_s[-1]) if len(self._trace) else 0.0
        latencies = self.served.latencies_ms()
        return Served(latencies, self.served.outcomes(), self.plans, self._sizes, end_s)

    def _start(self) -> None:
        pace, front = self.pace, self.front
        if not front.has_workers:
            self.bins = {f"engine-{number}": ALL_BINS for number in range(front.workers)}
        else:
            decision = decide.first_plan(front, front.workers, self._names)
            self.bins = {action.worker: action.bin for action in decision.actions}
            self.plans.append((0.0, decision.counts, decision.reason))
        for name, bin_edge in self.bins.items():
            self.served.add(name, bin_edge)
        self._note_size()
        if front.is_scaled:
            self.served.listeners.append(self._ended.append)
        if front.has_workers:
            self.events.every(min(_LOOK_S, pace.plan_period_s / 10 or _LOOK_S), self._look)
        for at, action in ((pace.kill_s, self._kill), (pace.leave_s, self._leave)):
            if at:
                self.events.at(at, action)

    def _look(self) -> None:
        """At most one of these is done, see `PlanLoop`."""
        now, period_s = self.events.now, self.pace.plan_period_s
        if self._rest is not None:
            return
        if period_s and now - self._plan_from >= period_s:
            self._plan()
        elif self.front.is_scaled and now - self._scale_from >= decide.SCALE_PERIOD_S:
            self._scale()

    def _plan(self, workers: int = 0, why: str = "") -> None:
        spare = [name for name in self._names if name not in self.bins]
        traffic = self._traffic(self._plan_from)
        period = decide.FrontPeriod(self.front, dict(self.bins), spare, traffic, len(self._names), workers)
        decision = decide.decide_period(period)
        self.plans.append((self.events.now, decision.counts, "; ".join(filter(None, (why, decision.reason)))))
        self._plan_from = self.events.now
        self._change(batches(decision.actions, under_load(len(self.bins))), is_plan=True)

    def _scale(self) -> None:
        now = self.events.now
        traffic, before = self._traffic(self._scale_from, self._ended), self._scale_from
        self._ended.clear()
        self._scale_from = now
        spare = in_order([name for name in self._names if name not in self.bins], self.bins)
        if self.pace.scaling == "headroom":
            self._change(iter([[*self._headroom(traffic, spare)]]))
            return
        if not decide.is_fast(self.front, traffic):
            self._fast_since = None
        elif self._fast_since is None:
            self._fast_since = before
        fast_s = 0.0 if self._fast_since is None else now - self._fast_since
        action, _ = decide.decide_scaling(self.front, traffic, fast_s, self.bins, spare, set(self.bins))
        if action is not None:
            self._fast_since = None
            self._change(iter([[action]]))

    def _headroom(self, traffic: Traffic, spare: Sequence[str]) -> Iterator[Action]:
        """INFaaS: the workers of each bin by the time that they computed, not by latencies."""
        front, others, left = self.front, iter(spare), len(self.bins)
        for bin_edge, count in Counter(self.bins.values()).items():
            load = self.served.spent_ms[bin_edge] / (1e3 * traffic.seconds)
            most = front.max_workers - len(self.bins) + count
            since = self._spare_since.get(bin_edge, 0)
            target, self._spare_since[bin_edge] = binpacking.scale(load, 1.0, count, 1, most, since)
            yield from (Action("load", name, bin_edge) for name in islice(others, max(0, target - count)))
            if target < count and left > front.min_workers:
                left -= 1
                held = [name for name, held_bin in self.bins.items() if held_bin == bin_edge]
                yield Action("unload", min(held, key=lambda name: traffic.outstanding.get(name, 0)), before=bin_edge)
        self.served.spent_ms.clear()

    def _traffic(self, since: float, ended: Sequence[Call] = ()) -> Traffic:
        """What arrived and was answered from `since` to now, as the front's metrics have it."""
        now, served = self.events.now, self.served
        first, last = np.searchsorted(self._trace.at_s, (since, now))
        steps = np.bincount(-(-self._trace.length[first:last] // LENGTH_STEP))
        texts = {float(step * LENGTH_STEP): float(count) for step, count in enumerate(steps.tolist()) if count}
        outstanding, overhead_ms = served.outstanding(), self.pace.overhead_ms
        answered_ms = [(at - row.arrived) * 1e3 + overhead_ms for at, _, rows, _ in ended for row in rows]
        return Traffic(
            seconds=max(now - since, 1e-9),
            texts=texts,
            answered=len(answered_ms),
            p98_ms=float(np.quantile(answered_ms, TAIL_QUANTILE)) if answered_ms else None,
            waiting=served.waiting,
            running=sum(outstanding.values()),
            outstanding=outstanding,
            live_pids=frozenset({1}),
        )

    # Changes.

    def _change(self, moves: Iterator[list[Action]], is_plan: bool = False) -> None:
        """Apply batch after batch, and forget what is left of the changes before."""
        self._rest, self._is_plan = moves, is_plan
        self._apply(moves)

    def _apply(self, moves: Iterator[list[Action]]) -> None:
        if moves is not self._rest:
            return
        batch = next(moves, None)
        if batch is not None:
            self.events.at(max(map(self._act, batch), default=self.events.now), self._apply, moves)
            return
        self._rest = None
        # What arrives while a plan is applied belongs to no period.
        if self._is_plan:
            self._plan_from = self.events.now
        self._note_size()

    def _act(self, action: Action) -> float:
        """Begin a change; when it will have ended."""
        free_at = self.events.now
        if action.worker in self.served.workers:
            free_at = max(free_at, self.served.remove(action.worker))
        if action.kind == "unload":
            del self.bins[action.worker]
            return free_at
        self.moved[action.worker] += action.worker in self.bins
        self.bins[action.worker] = action.bin
        self.events.at(free_at + self.pace.change_s, self._join, (action.worker, action.bin))
        return free_at + self.pace.change_s

    def _join(self, worker: tuple[str, int]) -> None:
        name, bin_edge = worker
        if self.bins.get(name) == bin_edge and name not in self.served.workers:
            self.served.add(name, bin_edge)

    # Faults.

    def _kill(self, _: None) -> None:
        outstanding = self.served.outstanding()
        if not outstanding:
            return
        busiest = max(outstanding, key=outstanding.__getitem__)
        self.served.remove(busiest, died=True)
        self.events.at(self.events.now + self.pace.recovery_s, self._join, (busiest, self.bins[busiest]))

    def _leave(self, _: None) -> None:
        node = split(self.front.models[-1])[0]
        self._names = [name for name in self._names if split(name)[0] != node]
        for name in [name for name in self.bins if split(name)[0] == node]:
            del self.bins[name]
            if name in self.served.workers:
                self.served.remove(name, died=True)
        self._plan(self.front.workers, f"node {node} is lost")

    def _note_size(self) -> None:
        if not self._sizes or self._sizes[-1][1] != len(self.bins):
            self._sizes.append((self.events.now, len(self.bins)))
