"""How many requests in a row each worker has not answered, as the fronts count them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shapeshift.fleet.node import split
from shapeshift.sidecar import observe
from shapeshift.sidecar.observe import MetricsPage


def in_a_row(page: MetricsPage, living: Collection[int]) -> dict[str, int]:
    """By worker, the most that any front with a process in `living` counts.

    A front that no worker of another node answers cannot reach that node: this says nothing about its workers.
    """
    found: dict[str, int] = {}
    for front in page.models:
        counts = observe.gauge(front, observe.TIMEOUTS, page, living)
        for worker, count in counts.items():
            if worker and not _is_unreachable(split(worker)[0], split(front)[0], counts):
                found[worker] = max(found.get(worker, 0), int(count))
    return found


def _is_unreachable(node: str, own: str, counts: Mapping[str, float]) -> bool:
    return node != own and all(count > 0 for worker, count in counts.items() if split(worker)[0] == node)
