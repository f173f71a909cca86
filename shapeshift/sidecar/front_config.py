"""The configuration of one front, as the sidecar uses it: workers, bins and service times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.settings import PlacementSettings, PolymorphSettings
from shapeshift.settings import require
from shapeshift.triton.names import split, worker_front

# The bin of a worker that holds all engines.
ALL_BINS = 0
# Settings that are numbers of workers: the nodes of a fleet may differ in them.
_COUNTS = ("workers", "min_workers", "max_workers")


@dataclass(frozen=True)
class Front:
    """A front and its configuration. In a fleet it is all front models of its name, one on each of some nodes.

    models: their qualified names. workers, min_workers, max_workers: sums over the nodes. answers: the
    version of its engines' answers, which may be mixed where it is the same. placement_reason: why `make engines` chose
    the placement. edges: longest text of each bin, tokens, ascending.
    weights: expected share of the texts in each bin before any traffic, summing to 1. service_ms: time of one text of
    each bin on its engine. The three lists are empty for a front without bins.
    """

    name: str
    settings: PolymorphSettings
    models: tuple[str, ...] = ()
    workers: int = 0
    min_workers: int = 1
    max_workers: int = 0
    answers: str = ""
    placement_reason: str = ""
    edges: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    service_ms: tuple[float, ...] = ()

    @property
    def has_workers(self) -> bool:
        return self.settings.placement != "inline"

    @property
    def is_binned(self) -> bool:
        """Whether each worker holds one bin."""
        return self.settings.placement == "partitioned"

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes on which it is loaded."""
        return frozenset(split(model)[0] for model in self.models)

    @property
    def shape(self) -> dict[str, object]:
        """What must be alike on all nodes, by parameter."""
        values = {field.name: getattr(self.settings, field.name) for field in fields(self.settings)}
        shared = {name: value for name, value in values.items() if name not in _COUNTS}
        generated = {"bin_edges": self.edges, "plan_histogram": self.weights, "answers_version": self.answers}
        return shared | generated

    @property
    def is_scaled(self) -> bool:
        """Whether the number of workers follows the tail latency."""
        return self.has_workers and self.settings.slo_ms > 0 and self.max_workers > self.min_workers

    def worker_number(self, model: str) -> int | None:
        """The number of a worker model of this front; None for any other model."""
        name = split(model)[1]
        owner, _, number = name.rpartition("_w")
        return int(number) if owner == self.name and worker_front(name) else None


def read_front(name: str, parameters: Mapping[str, str]) -> Front:
    """The front `name` with these parameters. Raises InvalidInputError with the name of an invalid parameter."""
    serving = settings.read(PolymorphSettings, parameters)
    generated = settings.read(PlacementSettings, parameters)
    require(
        serving.placement != "auto", "placement", serving.placement, "is not resolved yet; run `shapeshift engines`"
    )
    front = Front(
        name=name,
        settings=serving,
        models=(name,),
        workers=serving.workers,
        min_workers=max(1, serving.min_workers),
        max_workers=serving.max_workers or serving.workers,
        answers=parameters.get("answers_version", ""),
        placement_reason=generated.placement_reason,
    )
    if serving.placement == "inline":
        return front
    require(
        serving.workers >= 1,
        "workers",
        serving.workers,
        "must be at least 1 for a front with workers; run `shapeshift engines`",
    )
    edges = tuple(generated.edges())
    if not edges and serving.placement == "resident":
        return front
    require(bool(edges), "bin_edges", generated.bin_edges, "must have at least one bin; run `shapeshift engines`")
    weights = _weights(generated.plan_histogram, len(edges))
    service_ms = service_times(parameters.get("profile", ""), edges)
    return replace(front, edges=edges, weights=weights, service_ms=service_ms)


def service_times(profile: str, edges: tuple[int, ...]) -> tuple[float, ...]:
    """Milliseconds of one text of each bin: on the static engine of that length, else on the dynamic engine.

    profile: JSON {"engines": [{"tokens": n or null, "latency": [[tokens, median, ..], ..]}, ..]}. The latency of
    the dynamic engine is interpolated linearly. Raises InvalidInputError.
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
        allowed = f"must be the profile that `shapeshift engines` writes ({error})"
        raise InvalidInputError("profile", profile, allowed) from None
    times = tuple(static[edge] if edge in static else _interpolate(points, edge) for edge in edges)
    for edge, latency in zip(edges, times, strict=True):
        allowed = f"must have a latency above 0 for bin {edge}; run `shapeshift engines`"
        require(0 < latency < float("inf"), "profile", latency, allowed)
    return times


def _interpolate(points: list[tuple[float, float]], tokens: int) -> float:
    """The latency at `tokens`: linear between the points, constant beyond them; 0 without points."""
    lengths, latencies = [length for length, _ in points], [latency for _, latency in points]
    return float(np.interp(tokens, lengths, latencies)) if points else 0.0


def _weights(text: str, bins: int) -> tuple[float, ...]:
    weights = _numbers("plan_histogram", text) or [1.0] * bins
    total = sum(weights)
    if len(weights) != bins or any(weight < 0 for weight in weights) or not 0 < total < float("inf"):
        allowed = f"must be {bins} numbers of at least 0, one for each bin, not all 0"
        raise InvalidInputError("plan_histogram", text, allowed)
    return tuple(weight / total for weight in weights)


def _numbers(name: str, text: str) -> list[float]:
    try:
        values: Any = json.loads(text)
    except ValueError:
        values = None
    usable = isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    if not usable:
        raise InvalidInputError(name, text, "must be a JSON list of numbers")
    return [float(value) for value in values]
