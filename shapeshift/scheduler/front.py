"""One front as the sidecar sees it: what its configuration says about workers, bins and service times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.settings import FleetSettings, PolymorphSettings
from shapeshift.settings import require
from shapeshift.triton.names import worker_front

# The bin of a worker that holds all engines.
ALL = 0


@dataclass(frozen=True)
class Front:
    """A front model and what it says; `reason`: why its placement is what it is.

    edges: its bins, tokens, ascending; weights: share of the requests of each bin before any was seen, summing
    to 1; services: ms of one text of each bin on its engine. All empty for a front without bins.
    """

    name: str
    settings: PolymorphSettings
    reason: str = ""
    edges: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    services: tuple[float, ...] = ()

    @property
    def has_workers(self) -> bool:
        return self.settings.placement != "inline"

    @property
    def is_binned(self) -> bool:
        """Whether each worker holds one bin."""
        return self.settings.placement == "partitioned"

    @property
    def least(self) -> int:
        """The fewest workers it may have."""
        return max(1, self.settings.min_workers)

    @property
    def most(self) -> int:
        """The most workers it may have."""
        return self.settings.max_workers or self.settings.workers

    @property
    def scales(self) -> bool:
        """Whether workers are added and released by its tail latency."""
        own = self.settings
        return self.has_workers and self.most > self.least and own.slo_ms > 0 and not own.worker_pool

    def worker_number(self, model: str) -> int | None:
        """The number of a worker model of this front, None for another model."""
        owner, _, number = model.rpartition("_w")
        return int(number) if owner == self.name and worker_front(model) else None


def read(name: str, parameters: Mapping[str, str]) -> Front:
    """The front `name` with these parameters. Raises InvalidInputError naming the one that makes no sense."""
    own = settings.read(PolymorphSettings, parameters)
    generated = settings.read(FleetSettings, parameters)
    require(own.placement != "auto", "placement", own.placement, "settled by `make engines`")
    if own.placement == "inline":
        return Front(name, own, generated.placement_reason)
    require(own.workers >= 1, "workers", own.workers, "at least 1 for a front with workers; run `make engines`")
    edges = tuple(generated.edges())
    if not edges and own.placement == "resident":
        return Front(name, own, generated.placement_reason)
    require(bool(edges), "bin_edges", generated.bin_edges, "at least one bin; run `make engines`")
    weights = _weights(generated.plan_histogram, len(edges))
    found = services(parameters.get("profile", ""), edges)
    return Front(name, own, generated.placement_reason, edges, weights, found)


def services(profile: str, edges: tuple[int, ...]) -> tuple[float, ...]:
    """Milliseconds of one text of each bin: of the static engine with that length, else of the dynamic one.

    profile: JSON {"engines": [{"tokens": n or null, "latency": [[tokens, median, ..], ..]}, ..]}. Between its
    points the dynamic engine's latency is straight. Raises InvalidInputError.
    """
    static: dict[int, float] = {}
    points: list[tuple[float, float]] = []
    try:
        for engine in json.loads(profile)["engines"]:
            measured = sorted((float(point[0]), float(point[1])) for point in engine["latency"])
            if engine["tokens"] is None:
                points = measured
            elif measured:
                length = int(engine["tokens"])
                static[length] = dict(measured).get(length, measured[-1][1])
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise InvalidInputError("profile", profile, f"the profile that `make engines` writes ({error})") from None
    found = tuple(static[edge] if edge in static else _between(points, edge) for edge in edges)
    for edge, latency in zip(edges, found, strict=True):
        require(0 < latency < float("inf"), "profile", latency, f"a latency above 0 for bin {edge}; run `make engines`")
    return found


def _between(points: list[tuple[float, float]], tokens: int) -> float:
    """The latency at `tokens`, straight between the points, constant beyond them; 0 without any."""
    lengths, latencies = [length for length, _ in points], [latency for _, latency in points]
    return float(np.interp(tokens, lengths, latencies)) if points else 0.0


def _weights(text: str, bins: int) -> tuple[float, ...]:
    weights = _numbers("plan_histogram", text) or [1.0] * bins
    total = sum(weights)
    if len(weights) != bins or any(weight < 0 for weight in weights) or not 0 < total < float("inf"):
        raise InvalidInputError("plan_histogram", text, f"{bins} numbers of at least 0, one a bin, not all 0")
    return tuple(weight / total for weight in weights)


def _numbers(name: str, text: str) -> list[float]:
    try:
        values: Any = json.loads(text)
    except ValueError:
        values = None
    usable = isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    if not usable:
        raise InvalidInputError(name, text, "a JSON list of numbers")
    return [float(value) for value in values]
