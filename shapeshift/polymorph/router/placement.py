"""Opens the router of a front whose texts workers compute: placements `resident` and `partitioned`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from logging import Logger

from shapeshift.engines.execution import engine_set
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.policy.algorithms import DISPATCHERS
from shapeshift.polymorph.policy.dispatch import Rules
from shapeshift.polymorph.router.assignment import DispatchedQueues, PackLimits, RowDispatcher, SharedQueue
from shapeshift.polymorph.router.router import Router
from shapeshift.polymorph.router.transport import Transport
from shapeshift.polymorph.service_times import ServiceTimes, bin_edges, entry_of_bin, service_times
from shapeshift.polymorph.settings import PlacementSettings, PolymorphSettings, worker_name
from shapeshift.serving.bounds import SloClasses, classes_of
from shapeshift.serving.model_args import Log, fleet_file
from shapeshift.serving.pb_utils import PbUtils
from shapeshift.settings import Choices

# Each opens what reaches the workers of a front: those of its server, and where it is in a fleet those of other nodes.
TRANSPORTS: Choices[Callable[[PbUtils, str, Sequence[str], Manifest, Log], Transport]] = Choices(
    "workers",
    {
        "server": "shapeshift.polymorph.router.bls_transport:open_transport",
        "fleet": "shapeshift.fleet.transport:open_transport",
    },
)


def open_router(
    pb_utils: PbUtils,
    front: str,
    manifest: Manifest,
    settings: PolymorphSettings,
    placement: PlacementSettings,
    log: Logger,
) -> Router:
    """The router of a placement. Raises InvalidInputError for `auto`, which `make engines` replaces."""
    if settings.placement == "auto" or not settings.max_workers:
        raise InvalidInputError(
            "placement, max_workers",
            [settings.placement, settings.max_workers],
            "set by `shapeshift engines`; run it again",
        )
    assignment, times = queues(manifest, settings, placement.edges() or bin_edges(manifest))
    workers = [worker_name(front, number) for number in range(settings.max_workers)]
    reached = "fleet" if fleet_file() else "server"
    transport = TRANSPORTS[reached](pb_utils, front, workers, manifest, log.warning)
    return Router(transport, assignment, times, settings, log)


def queues(
    manifest: Manifest, settings: PolymorphSettings, edges: Sequence[int]
) -> tuple[DispatchedQueues | SharedQueue, ServiceTimes]:
    """The queues of a front whose workers hold one of the bins `edges` each, or all, and what calls cost by profile."""
    limits = pack_limits(manifest, settings)
    times = service_times(manifest, edges, limits)
    classes = SloClasses(classes_of(settings.slo_classes))
    if settings.placement != "partitioned":
        return SharedQueue(limits, times.of_row, classes), times
    services = [times.of_bin(edge) for edge in edges]
    dispatcher: RowDispatcher = DISPATCHERS[settings.dispatch](edges, services, Rules(settings.dispatch))
    levels = capacities(settings.slo_ms, services)
    return DispatchedQueues(dispatcher, edges, levels, limits, times.of_row, classes), times


def capacities(slo_ms: float, services_ms: Sequence[float]) -> list[float]:
    """Of each bin: how many texts, one after another, meet the objective; at least one."""
    return [float(max(1, int(slo_ms / service))) for service in services_ms]


def pack_limits(manifest: Manifest, settings: PolymorphSettings) -> PackLimits:
    most_rows = engine_set.max_rows(manifest)
    efficient = min(settings.pack_tokens or engine_set.efficient_tokens(manifest), manifest.pack_tokens)

    @cache
    def limits(edge: int) -> tuple[int, int]:
        entry = entry_of_bin(manifest, edge) if edge else None
        if entry is None or entry.tokens is None:
            # The worker of a bin takes no longer packs.
            return min(efficient, edge or efficient), most_rows
        # A static engine takes the same time however full it is.
        return entry.tokens, min(most_rows, entry.rows or most_rows)

    return limits
