"""The policies of token_adapt for `shapeshift policy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.policy_api import Check, OptionalField, Policy, integer, list_of, number
from shapeshift.token_adapt.policy import plan
from shapeshift.token_adapt.policy.baselines import rate_based
from shapeshift.token_adapt.policy.batching import BatchQueue

_NOT_NEGATIVE = number(minimum=0)
_ROWS = list_of(list_of(_NOT_NEGATIVE, min_length=1))


@dataclass
class _NumberedRequest:
    index: int
    arrival: float
    deadline: float
    utility: float
    excluded: frozenset[int] = frozenset()
    rank: int = 0


def _batch(requests: list[list[float]], delta: float, epsilon: int, eta: float, mu: float) -> dict[str, Any]:
    _check_ascending("requests", [arrival for arrival, _, _ in requests], "in order of arrival")
    queue: BatchQueue[_NumberedRequest] = BatchQueue(delta, epsilon, eta, mu)
    for index, (arrival, latency, utility) in enumerate(requests):
        queue.add(_NumberedRequest(index, arrival, arrival + latency, utility))
    return {"batches": [[request.index for request in batch.images] for batch in queue.batches]}


def _plan(
    now: float,
    deadlines: list[float],
    times: list[list[float]],
    utilities: list[list[float]],
    memory: list[list[float]] | None,
    memory_limit: float | None,
    tick_ms: float,
    algorithm: str,
) -> dict[str, Any]:
    _check_ascending("deadlines", deadlines, "in ascending order")
    gammas = _check_table("times", times, len(deadlines))
    _check_table("utilities", utilities, len(deadlines), gammas)
    if (memory is None) != (memory_limit is None):
        name = "memory" if memory is None else "memory_limit"
        raise InvalidInputError(name, None, "memory and memory_limit must be given together")
    if memory is not None:
        _check_table("memory", memory, len(deadlines), gammas)
    problem = plan.PlanProblem.of(now, deadlines, times, utilities, memory, memory_limit)
    planned = plan.solve(problem, algorithm, tick_ms)
    return {"plan": planned, "utility": problem.utility(planned)}


def _by_rate(
    now: float,
    rate: float,
    table: list[tuple[float, int]],
    gammas: list[int],
    deadlines: list[float],
    times: list[list[float]],
    mean_utilities: list[float],
    kappa: float,
) -> dict[str, Any]:
    if len(set(gammas)) < len(gammas):
        raise InvalidInputError("gammas", gammas, "each gamma only once")
    _check_ascending("table", [rate for rate, _ in table], "rows by ascending rate")
    for row, (_, gamma) in enumerate(table):
        if gamma not in gammas:
            raise InvalidInputError(f"table[{row}]", gamma, f"one of gammas ({', '.join(map(str, gammas))})")
    _check_ascending("deadlines", deadlines, "in ascending order")
    _check_table("times", times, len(deadlines), len(gammas))
    _check_length("mean_utilities", mean_utilities, len(deadlines))
    return {"plan": rate_based.allocate(now, rate, table, gammas, deadlines, times, mean_utilities, kappa)}


def _check_ascending(name: str, values: Sequence[float], allowed: str) -> None:
    if any(b < a for a, b in zip(values, values[1:], strict=False)):
        raise InvalidInputError(name, values, allowed)


def _check_length(name: str, values: Sequence[Any], batches: int) -> None:
    if len(values) != batches:
        raise InvalidInputError(name, f"{len(values)} values", f"one for each of the {batches} deadlines")


def _check_table(name: str, rows: list[list[float]], batches: int, gammas: int | None = None) -> int:
    """Check for one row per batch and one value per gamma; returns the number of gammas."""
    _check_length(name, rows, batches)
    if gammas is None:
        gammas = len(rows[0]) if rows else 0
    for index, row in enumerate(rows):
        if len(row) != gammas:
            raise InvalidInputError(f"{name}[{index}]", f"{len(row)} values", f"one for each of the {gammas} gammas")
    return gammas


def _triple(name: str, value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 3:
        raise InvalidInputError(name, value, "[arrival, latency, utility]")
    arrival, latency, utility = value
    return [
        number()(f"{name}[0]", arrival),
        number(above=0)(f"{name}[1]", latency),
        _NOT_NEGATIVE(f"{name}[2]", utility),
    ]


def _row(name: str, value: Any) -> tuple[float, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidInputError(name, value, "[lowest rate, gamma]")
    return _NOT_NEGATIVE(f"{name}[0]", value[0]), integer()(f"{name}[1]", value[1])


def _nullable(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


POLICIES = (
    Policy(
        "token_adapt.batch",
        "which requests share a batch",
        _batch,
        {
            "requests": list_of(_triple),
            "delta": _NOT_NEGATIVE,
            "epsilon": integer(minimum=1),
            "eta": _NOT_NEGATIVE,
            "mu": _NOT_NEGATIVE,
        },
    ),
    Policy(
        "token_adapt.plan",
        "which waiting batches run, and at which gamma",
        _plan,
        {
            "now": number(),
            "deadlines": list_of(number()),
            "times": _ROWS,
            "utilities": _ROWS,
            "memory": OptionalField(_nullable(_ROWS), None),
            "memory_limit": OptionalField(_nullable(_NOT_NEGATIVE), None),
            "tick_ms": OptionalField(number(above=0), plan.TICK_MS),
        },
        tuple(plan.ALGORITHMS),
    ),
    Policy(
        "token_adapt.by_rate",
        "gammas by the arrival rate",
        _by_rate,
        {
            "now": number(),
            "rate": _NOT_NEGATIVE,
            "table": list_of(_row, min_length=1),
            "gammas": list_of(integer(), min_length=1),
            "deadlines": list_of(number()),
            "times": _ROWS,
            "mean_utilities": list_of(_NOT_NEGATIVE),
            "kappa": number(),
        },
    ),
)
