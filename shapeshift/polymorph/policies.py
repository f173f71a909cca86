"""The policies of this technique and their JSON face."""

from __future__ import annotations

from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.policy import Optional, Policy, integer, list_of, number
from shapeshift.polymorph import bins, staircase


def _bins(hist: list[int], latency: list[float], k: int) -> dict[str, Any]:
    if len(latency) != len(hist):
        raise InvalidInputError("latency", f"{len(latency)} values", f"as many as hist has ({len(hist)})")
    if not any(hist):
        raise InvalidInputError("hist", hist, "at least one request")
    edges, mean = bins.optimal_edges(hist, latency, k)
    return {"edges": edges, "mean_latency": mean}


def _staircase(lengths: list[int], latency: list[float], tolerance: float) -> dict[str, Any]:
    if len(latency) != len(lengths):
        raise InvalidInputError("latency", f"{len(latency)} values", f"as many as lengths has ({len(lengths)})")
    if any(b <= a for a, b in zip(lengths, lengths[1:], strict=False)):
        raise InvalidInputError("lengths", lengths, "strictly ascending")
    return {"edges": staircase.step_ends(lengths, latency, tolerance)}


POLICIES = (
    Policy(
        "polymorph.bins",
        "static engine lengths that minimise the mean latency of a length histogram",
        _bins,
        {
            "hist": list_of(integer(minimum=0), least=1),
            "latency": list_of(number(minimum=0), least=1),
            "k": integer(minimum=1),
        },
    ),
    Policy(
        "polymorph.staircase",
        "the step ends of a measured latency curve",
        _staircase,
        {
            "lengths": list_of(integer(minimum=1), least=1),
            "latency": list_of(number(minimum=0), least=1),
            "tolerance": Optional(number(minimum=0), 0.05),
        },
    ),
)
