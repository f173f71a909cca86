"""What computes the texts of a front: engine threads in its own process, or workers behind a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from shapeshift.engines.execution import engine_set
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.policy.algorithms import DISPATCHERS
from shapeshift.polymorph.policy.dispatch import Rules
from shapeshift.polymorph.router.assignment import Assignment, DispatchedQueues, PackLimits, RowDispatcher, SharedQueue
from shapeshift.polymorph.router.router import Router
from shapeshift.polymorph.router.transport import Transport
from shapeshift.polymorph.service_times import ServiceTimes, bin_edges, entry_of_bin, service_times
from shapeshift.polymorph.settings import PlacementSettings, PolymorphSettings, worker_name
from shapeshift.serving.front import fleet_file
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Metric
from shapeshift.serving.model_args import Log
from shapeshift.serving.pb_utils import PbUtils
from shapeshift.settings import Choices

# Each opens what reaches the workers of a front: those of its server, and where it is in a fleet those of other nodes;
# processes of ours, or models of Triton's own backends.
TRANSPORTS: Choices[Callable[[PbUtils, str, Sequence[str], Manifest, Log], Transport]] = Choices(
    "workers",
    {
        "server": "shapeshift.polymorph.router.bls_transport:open_transport",
        "fleet": "shapeshift.fleet.transport:open_transport",
        "server, triton": "shapeshift.polymorph.router.engine_client:open_transport",
        "fleet, triton": "shapeshift.fleet.transport:open_engine_transport",
    },
)


class Executor(Protocol):
    """Takes requests and completes them on its own threads."""

    @property
    def waiting(self) -> int:
        """Texts that wait."""

    @property
    def running(self) -> int:
        """Texts that are being computed."""

    def require_room(self, latency_ms: float | None) -> None:
        """Raise OverloadedError where any request of this `latency_ms` would be refused: before its texts are read."""

    def submit(self, request: TextRequest) -> None:
        """Queue all rows of `request`. Raises OverloadedError where they do not fit."""

    @property
    def steps(self) -> list[StepCounter]:
        """The steps of its threads."""

    def metrics(self) -> Sequence[Metric]:
        """The executor's metrics, exported beside the front's own."""

    def close(self) -> None:
        """Answer waiting texts with UNAVAILABLE, let running calls end, stop the threads."""


def open_executor(
    pb_utils: PbUtils,
    front: str,
    made: Manifest,
    folder: Path,
    own: PolymorphSettings,
    placement: PlacementSettings,
    log: Log,
    device: int | None = None,
) -> Executor:
    """The executor of a placement. Raises InvalidInputError for `auto`, which `make engines` replaces."""
    if own.placement == "inline":
        return EngineExecutor(made, folder, own, log, device)
    if own.placement == "auto" or not own.max_workers:
        raise InvalidInputError(
            "placement, max_workers", [own.placement, own.max_workers], "set by `shapeshift engines`; run it again"
        )
    edges = placement.edges() or bin_edges(made)
    limits = _pack_limits(made, own)
    times = service_times(made, edges, limits)
    shared = own.placement == "resident"
    assignment: Assignment = SharedQueue(limits, times.of_row) if shared else _dispatched(own, edges, times, limits)
    workers = [worker_name(front, number) for number in range(own.max_workers)]
    reached = "fleet" if fleet_file() else "server"
    if own.engine_models:
        reached = f"{reached}, triton"
    transport = TRANSPORTS[reached](pb_utils, front, workers, made, log)
    return Router(transport, assignment, times, own, log)


def _dispatched(own: PolymorphSettings, edges: list[int], times: ServiceTimes, limits: PackLimits) -> DispatchedQueues:
    services = [times.of_bin(edge) for edge in edges]
    capacities = [float(max(1, int(own.slo_ms / service))) for service in services]
    rules = Rules(own.dispatch, own.threshold, own.decay, own.peek)
    dispatcher: RowDispatcher = DISPATCHERS[own.dispatch](edges, services, rules)
    return DispatchedQueues(dispatcher, edges, capacities, limits, times.of_row)


def _pack_limits(made: Manifest, own: PolymorphSettings) -> PackLimits:
    most_rows = engine_set.max_rows(made)
    efficient = min(own.pack_tokens or engine_set.efficient_tokens(made), made.max_tokens)

    def limits(edge: int) -> tuple[int, int]:
        entry = entry_of_bin(made, edge) if edge else None
        if entry is None or entry.tokens is None:
            return efficient, most_rows
        # A static engine takes the same time however full it is.
        return entry.tokens, min(most_rows, entry.rows or most_rows)

    return limits
