"""The policies of this technique and their JSON API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.policy_api import (
    Check,
    OptionalField,
    Policy,
    boolean,
    identifier,
    integer,
    list_of,
    nullable,
    number,
    record,
)
from shapeshift.polymorph.policy import allocate, autoscale, bins, dispatch, replace
from shapeshift.polymorph.policy.algorithms import ALLOCATIONS
from shapeshift.polymorph.policy.curves import MD1, Affine, Clamped, Curve, Table
from shapeshift.polymorph.policy.problem import Problem

# The time and memory of an exact allocation grow with the square of the GPUs.
_MOST_GPUS = 100_000
_MOST_OUTSTANDING = 10**12


def _as_many(name: str, values: list[Any], as_name: str, as_many: int) -> None:
    if len(values) != as_many:
        raise InvalidInputError(name, f"{len(values)} values", f"as many as {as_name} has ({as_many})")


def _ascending(name: str, values: list[int]) -> None:
    if any(b <= a for a, b in zip(values, values[1:], strict=False)):
        raise InvalidInputError(name, values, "strictly ascending")


def _bins(hist: list[int], latency: list[float], k: int) -> dict[str, Any]:
    _as_many("latency", latency, "hist", len(hist))
    if not any(hist):
        raise InvalidInputError("hist", hist, "at least one request")
    edges, mean = bins.optimal_edges(hist, latency, k)
    return {"edges": edges, "mean_latency": mean}


def _staircase(lengths: list[int], latency: list[float], tolerance: float) -> dict[str, Any]:
    _as_many("latency", latency, "lengths", len(lengths))
    _ascending("lengths", lengths)
    return {"edges": bins.step_ends(lengths, latency, tolerance)}


def _allocate(
    gpus: int, demand: list[float], capacity: list[float], latency: list[Curve], cap_last: bool, algorithm: str
) -> dict[str, Any]:
    _as_many("capacity", capacity, "demand", len(demand))
    _as_many("latency", latency, "demand", len(demand))
    problem = Problem(gpus, tuple(demand), tuple(capacity), tuple(latency), cap_last)
    result = allocate.allocate(problem, algorithm)
    return {
        "counts": list(result.counts),
        "objective": result.objective,
        "feasible": result.feasible,
        "solve_ms": result.solve_ms,
    }


def _dispatch(
    length: int,
    levels: list[dispatch.Level[Any]],
    threshold: float,
    decay: float,
    peek: int,
    algorithm: str,
) -> dict[str, Any]:
    _ascending("levels", [level.max_length for level in levels])
    ids = [instance.id for level in levels for instance in level.instances]
    if len({type(one) for one in ids}) > 1:
        raise InvalidInputError("levels", ids, "instance ids that are all whole numbers or all strings")
    if len(set(ids)) < len(ids):
        raise InvalidInputError("levels", ids, "instance ids that are all different")
    for index, level in enumerate(levels):
        if algorithm == "earliest_finish" and level.service_ms is None:
            raise InvalidInputError(f"levels[{index}].service_ms", None, "a number above 0: earliest_finish needs it")
    chosen = dispatch.choose(length, levels, dispatch.Rules(algorithm, threshold, decay, peek))
    level_index, instance = chosen or (None, None)
    return {"level": level_index, "instance": instance}


def _replace(have: list[int], want: list[int], edges: list[int]) -> dict[str, Any]:
    _ascending("edges", edges)
    _as_many("want", want, "edges", len(edges))
    if sum(want) != len(have):
        raise InvalidInputError("want", want, f"counts whose sum is the number of workers ({len(have)})")
    for worker, held in enumerate(have):
        if held not in edges:
            raise InvalidInputError(f"have[{worker}]", held, f"one of edges ({', '.join(map(str, edges))})")
    return {"changes": [list(change) for change in replace.changes(have, want, edges)]}


def _autoscale(
    p98_ms: float,
    slo_ms: float,
    below_since_s: float,
    workers: int,
    min_workers: int,
    max_workers: int,
    outstanding: list[int],
) -> dict[str, Any]:
    if len(outstanding) != workers:
        raise InvalidInputError("outstanding", f"{len(outstanding)} values", f"one a worker ({workers})")
    if min_workers > max_workers:
        raise InvalidInputError("max_workers", max_workers, f"at least min_workers ({min_workers})")
    decision = autoscale.decide(p98_ms, slo_ms, below_since_s, outstanding, min_workers, max_workers)
    return {"action": decision.action, "worker": decision.worker}


_POSITIVE = number(above=0)
# The fields of a latency curve by its kind, after `kind` itself.
_CURVES: dict[str, tuple[dict[str, Check | OptionalField], Callable[..., Any]]] = {
    "affine": ({"l": _POSITIVE}, lambda kind, l: Affine(l)),  # noqa: E741
    "clamped": ({"l": _POSITIVE}, lambda kind, l: Clamped(l)),  # noqa: E741
    "table": ({"y": list_of(number(minimum=0), min_length=1)}, lambda kind, y: Table(tuple(y))),
    "md1": ({"l": _POSITIVE, "m": _POSITIVE}, lambda kind, l, m: MD1(l, m)),  # noqa: E741
}


def _curve(name: str, value: Any) -> Any:
    """A latency curve: {"kind": affine | clamped | table | md1, and its parameters}."""
    kinds = ", ".join(_CURVES)
    if not isinstance(value, dict) or "kind" not in value:
        raise InvalidInputError(name, value, f"an object with a kind: {kinds}")
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in _CURVES:
        raise InvalidInputError(f"{name}.kind", kind, f"one of {kinds}")
    fields, build = _CURVES[kind]
    return record({"kind": lambda _, text: text, **fields}, build)(name, value)


_INSTANCE = record(
    {"id": identifier, "outstanding": integer(minimum=0, maximum=_MOST_OUTSTANDING), "capacity": number(above=0)},
    dispatch.Instance,
)
_LEVEL = record(
    {
        "max_length": integer(minimum=1),
        "service_ms": OptionalField(nullable(number(above=0)), None),
        "instances": list_of(_INSTANCE),
    },
    lambda max_length, service_ms, instances: dispatch.Level(max_length, tuple(instances), service_ms),
)

POLICIES = (
    Policy(
        "polymorph.bins",
        "static engine lengths that minimise the mean latency of a length histogram",
        _bins,
        {
            "hist": list_of(integer(minimum=0), min_length=1),
            "latency": list_of(number(minimum=0), min_length=1),
            "k": integer(minimum=1),
        },
    ),
    Policy(
        "polymorph.staircase",
        "the step ends of a measured latency curve",
        _staircase,
        {
            "lengths": list_of(integer(minimum=1), min_length=1),
            "latency": list_of(number(minimum=0), min_length=1),
            "tolerance": OptionalField(number(minimum=0), 0.05),
        },
    ),
    Policy(
        "polymorph.allocate",
        "how many GPUs each static length gets",
        _allocate,
        {
            "gpus": integer(minimum=1, maximum=_MOST_GPUS),
            "demand": list_of(number(minimum=0), min_length=1),
            "capacity": list_of(number(minimum=1), min_length=1),
            "latency": list_of(_curve, min_length=1),
            "cap_last": OptionalField(boolean, False),
        },
        tuple(ALLOCATIONS),
    ),
    Policy(
        "polymorph.dispatch",
        "which instance serves a request",
        _dispatch,
        {
            "length": integer(minimum=1),
            "levels": list_of(_LEVEL),
            "threshold": OptionalField(number(minimum=0), dispatch.Rules.threshold),
            "decay": OptionalField(number(minimum=0), dispatch.Rules.decay),
            "peek": OptionalField(integer(minimum=1), dispatch.Rules.peek),
        },
        tuple(dispatch.SCORED),
    ),
    Policy(
        "polymorph.replace",
        "which workers change their bin, so that an allocation is reached",
        _replace,
        {
            "have": list_of(integer(minimum=1)),
            "want": list_of(integer(minimum=0), min_length=1),
            "edges": list_of(integer(minimum=1), min_length=1),
        },
    ),
    Policy(
        "polymorph.autoscale",
        "whether a worker is added or released",
        _autoscale,
        {
            "p98_ms": number(minimum=0),
            "slo_ms": number(above=0),
            "below_since_s": number(minimum=0),
            "workers": integer(minimum=0),
            "min_workers": OptionalField(integer(minimum=1), 1),
            "max_workers": integer(minimum=1),
            "outstanding": list_of(integer(minimum=0)),
        },
    ),
)
