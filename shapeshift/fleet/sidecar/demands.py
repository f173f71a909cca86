"""How many workers and nodes each front wants, in a file for whoever provides the nodes.

It is a wish, not a plan: numbers, not changes. Reading it twice, or late, does no harm.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shapeshift import files
from shapeshift.fleet.policy.node_count import NodeUse, WorkerDemand, wanted_nodes
from shapeshift.sidecar import observe
from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.policy import decide
from shapeshift.sidecar.workers import ServerModels
from shapeshift.triton.names import split

# In the run directory of the sidecar.
DEMAND_FILE = "demand.json"
SLOTS, KV_USAGE = "shapeshift_slots", "shapeshift_kv_cache_usage"

# By process: requests that wait or run, slots, and the share of the KV cache that is used.
_Held = Mapping[int, tuple[float, float, float]]


@dataclass(frozen=True)
class _Front:
    """models: on each node; slo_ms: latency objective, 0 without."""

    models: Sequence[str]
    slo_ms: float


@dataclass
class _Period:
    """start: the page with which it began; held: of each page since; fast_since: see `NodeUse.is_fast`."""

    models: Sequence[str]
    start: MetricsPage
    held: list[_Held] = field(default_factory=list)
    fast_since: float | None = None


class NodeDemand:
    """One thread calls `step`, with each page. period_s: seconds between two decisions about a front."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._periods: dict[str, _Period] = {}
        self._demands: dict[str, WorkerDemand] = {}

    def step(self, server: ServerModels, page: MetricsPage) -> Mapping[str, WorkerDemand]:
        """By front, the nodes that it wants. A front without `slo_ms` and without slots wants none."""
        if server.pending:
            # Soon it is known whether these nodes are gone.
            return self._demands
        fronts = _fronts(server, page)
        self._periods = {name: period for name, period in self._periods.items() if name in fronts}
        self._demands = {name: wish for name, wish in self._demands.items() if name in fronts}
        for name, front in fronts.items():
            period = self._periods.get(name)
            if period is None or period.models != front.models:
                # On other nodes than before its load is another one.
                self._periods[name] = _Period(front.models, page)
                self._demands[name] = WorkerDemand(len(front.models), 1)
            elif page.at > period.start.at:
                self._follow(name, front, period, page)
        return self._demands

    def _follow(self, name: str, front: _Front, period: _Period, page: MetricsPage) -> None:
        period.held.append(_held(front.models, page))
        if page.at - period.start.at < self._period_s:
            return
        nodes = len(front.models)
        traffic = observe.traffic_of(front.models, period.start, page)
        tail_ms = decide.tail_ms(traffic) if front.slo_ms else None
        occupancies = [share for one in period.held if (share := _occupancy(one, traffic.live_pids)) is not None]
        use = NodeUse(
            latency=None if tail_ms is None else tail_ms / front.slo_ms,
            occupancy=sum(occupancies) / len(occupancies) if occupancies else None,
        )
        # Requests that run without answers say nothing about the latency.
        is_fast = use.is_fast(nodes) and (use.latency is not None or not front.slo_ms)
        fast_since = (period.fast_since or period.start.at) if is_fast else None
        fast_since_s = 0.0 if fast_since is None else page.at - fast_since
        self._demands[name] = WorkerDemand(wanted_nodes(use, fast_since_s, nodes), 1)
        self._periods[name] = _Period(front.models, page, fast_since=fast_since)


def _fronts(server: ServerModels, page: MetricsPage) -> dict[str, _Front]:
    """The fronts that fill whole nodes and say how full these are."""
    fronts = {
        name: _Front(front.models, front.settings.slo_ms)
        for name, front in server.fronts.items()
        if front.settings.slo_ms and not front.is_scaled
    }
    others: dict[str, list[str]] = {}
    for model in server.objectives:
        others.setdefault(split(model)[1], []).append(model)
    for name, models in others.items():
        slo_ms = max(server.objectives[model] for model in models)
        has_slots = any(True for model in models for _ in page.series(model, SLOTS))
        # Only fronts export how many requests wait.
        is_front = any(True for model in models for _ in page.series(model, observe.WAITING))
        if has_slots or (slo_ms and is_front):
            fronts[name] = _Front(tuple(sorted(models)), slo_ms)
    return fronts


def _held(models: Sequence[str], page: MetricsPage) -> _Held:
    held: dict[int, list[float]] = {}
    places = {observe.WAITING: 0, observe.RUNNING: 0, SLOTS: 1, KV_USAGE: 2}
    for model in models:
        for series in page.models.get(model, ()):
            if series.name in places and not series.label:
                held.setdefault(series.pid, [0.0, 0.0, 0.0])[places[series.name]] += series.value
    return {pid: (values[0], values[1], values[2]) for pid, values in held.items()}


def _occupancy(held: _Held, alive: Collection[int]) -> float | None:
    """Share of the slots or of the KV cache, whichever is more; None where no process has slots."""
    processes = [values for pid, values in held.items() if pid in alive and values[1] > 0]
    if not processes:
        return None
    requests, slots, usage = map(sum, zip(*processes, strict=True))
    return float(max(requests / slots, usage / len(processes)))


def read(file: Path) -> dict[str, WorkerDemand]:
    """By front, what it wants; empty if the file is missing or damaged."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        demands = {str(name): WorkerDemand(int(workers), int(per_node)) for name, (workers, per_node) in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {name: one for name, one in demands.items() if one.workers >= 0 and one.per_node >= 1}


def write(file: Path, demands: Mapping[str, WorkerDemand]) -> None:
    """Replace the file. demands: by front. Raises OSError."""
    text = json.dumps({name: [one.workers, one.per_node] for name, one in sorted(demands.items())})
    files.replace_text(file, text + "\n", durable=False)


class FleetDemands:
    """Writes `file` where something changes. period_s: see `NodeDemand`."""

    def __init__(self, file: Path, period_s: float) -> None:
        self._file = file
        self._nodes = NodeDemand(period_s)
        # Of fronts whose number of workers follows the latency, and of the others.
        self._workers: dict[str, WorkerDemand] = {}
        self._whole: Mapping[str, WorkerDemand] = {}
        self._written: dict[str, WorkerDemand] = {}

    def record(self, front: Front, workers: int) -> None:
        """The front wants so many workers."""
        per_node = max(1, front.max_workers // max(1, len(front.nodes)))
        self._workers[front.name] = WorkerDemand(workers, per_node)

    def step(self, server: ServerModels, page: MetricsPage | None, is_blocked: bool) -> None:
        """Take the present page into account, forget fronts that are gone, and say what is wanted.

        is_blocked: nothing is to change; then nothing is wanted.
        """
        if page is not None:
            self._whole = self._nodes.step(server, page)
        self._workers = {name: one for name, one in self._workers.items() if name in server.fronts}
        demands = {} if is_blocked else {**self._whole, **self._workers}
        if demands != self._written:
            self._written = demands
            # On a full disk the nodes stay; workers and plans do not depend on it.
            with contextlib.suppress(OSError):
                write(self._file, demands)
