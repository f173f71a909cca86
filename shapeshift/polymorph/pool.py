"""What computes a front's texts: engine threads in its own process, or workers behind a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from shapeshift.engines import ladder
from shapeshift.engines.hardware import cores
from shapeshift.engines.inline import InlinePool
from shapeshift.engines.manifest import Manifest
from shapeshift.engines.request import TextRequest
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.assignment import Assignment, DispatchedQueues, Dispatching, PackLimits, SharedQueue
from shapeshift.polymorph.binpacking import Packer
from shapeshift.polymorph.dispatch import Rules
from shapeshift.polymorph.dispatcher import Dispatcher
from shapeshift.polymorph.profile import ServiceTimes, bin_edges, entry_of_bin, service_times
from shapeshift.polymorph.router import RouterPool
from shapeshift.polymorph.settings import FleetSettings, PolymorphSettings, worker_name
from shapeshift.polymorph.worker_client import WorkerClient
from shapeshift.serving.log import Log
from shapeshift.serving.metrics import Counter, Gauge


class Pool(Protocol):
    """Takes requests and completes them on threads of its own."""

    @property
    def waiting(self) -> int:
        """Texts that wait."""

    @property
    def running(self) -> int:
        """Texts that are computed at this moment."""

    def submit(self, request: TextRequest) -> None:
        """Queue all rows of `request`; OverloadedError when they do not fit."""

    def metrics(self) -> list[Counter | Gauge]:
        """What is exported beside the front's own metrics."""

    def close(self) -> None:
        """Answer what waits with UNAVAILABLE, let running calls end, stop the threads."""


def open_pool(
    pb_utils: Any,
    front: str,
    made: Manifest,
    folder: Path,
    own: PolymorphSettings,
    fleet: FleetSettings,
    log: Log,
) -> Pool:
    """The pool of a placement that `make engines` has settled. Raises InvalidInputError for `auto`."""
    if own.placement == "inline":
        return InlinePool(made, folder, own, own.engine_threads or cores(), log)
    if own.placement == "auto" or not own.max_workers:
        raise InvalidInputError("placement, max_workers", [own.placement, own.max_workers], "settled by `make engines`")
    edges = fleet.edges() or bin_edges(made)
    times = service_times(made, edges)
    limits = _pack_limits(made, own)
    shared = own.placement == "resident"
    assignment: Assignment = SharedQueue(limits) if shared else _dispatched(own, edges, times, limits)
    client = WorkerClient(pb_utils, [output.name for output in made.outputs])
    workers = [worker_name(front, number) for number in range(own.max_workers)]
    return RouterPool(client, workers, assignment, times, own, log)


def _dispatched(own: PolymorphSettings, edges: list[int], times: ServiceTimes, limits: PackLimits) -> DispatchedQueues:
    services = [times.of_bin(edge) for edge in edges]
    capacities = [float(max(1, int(own.slo_ms / service))) for service in services]
    dispatcher: Dispatching
    if own.dispatch == "bin_packing":
        dispatcher = Packer(edges)
    else:
        dispatcher = Dispatcher(edges, services, Rules(own.dispatch, own.threshold, own.decay, own.peek))
    return DispatchedQueues(dispatcher, edges, capacities, limits)


def _pack_limits(made: Manifest, own: PolymorphSettings) -> PackLimits:
    most_rows = ladder.max_rows(made)
    efficient = min(own.pack_tokens or ladder.efficient_tokens(made), made.max_tokens)

    def limits(edge: int) -> tuple[int, int]:
        entry = entry_of_bin(made, edge) if edge else None
        if entry is None or entry.tokens is None:
            return efficient, most_rows
        # A static engine takes the same time however full it is.
        return entry.tokens, min(most_rows, entry.rows or most_rows)

    return limits
