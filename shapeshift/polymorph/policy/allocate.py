"""How many GPUs each static length gets: solves a `problem.Problem`, also where its constraints cannot be met."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shapeshift.polymorph.policy.algorithms import ALLOCATIONS
from shapeshift.polymorph.policy.problem import Problem


@dataclass(frozen=True)
class Allocation:
    """The answer to a `Problem`.

    counts: N_i; objective: Eq. 1 for them and the demand x theta; feasible: whether they meet the constraints
    for the whole demand; theta: the share of the demand that they are for; solve_ms: time to solve.
    """

    counts: tuple[int, ...]
    objective: float
    feasible: bool
    theta: float
    solve_ms: float


def allocate(problem: Problem, algorithm: str = "exact") -> Allocation:
    """Divide the GPUs with one of `algorithms.ALLOCATIONS`.

    Where the lower bounds exceed `gpus`, the counts are for the demand scaled by theta = (G - 1) / sum of
    Q_i / M_i; where only the cap cannot be met, they ignore it. `feasible` is false in both cases. Of equally good
    counts, the longest runtime gets the surplus.
    Raises ValueError for latencies beyond a float's range, UnsupportedError where the solver is unavailable.
    """
    # Before the clock starts: numba takes a second to import.
    solver = ALLOCATIONS[algorithm]
    before = time.perf_counter()
    solved, theta = problem.shrunk()
    counts = solver(solved)
    if counts is None:
        counts = solver(replace(solved, cap_last=False))
    if counts is None or not math.isfinite(objective := solved.objective(counts)):
        raise ValueError("latency: too large to add up")
    solve_ms = (time.perf_counter() - before) * 1000.0
    return Allocation(tuple(counts), objective, problem.met_by(counts), theta, solve_ms)


def even(problem: Problem) -> Sequence[int]:
    """G / I each, the remainder to the longest; ignores demand and constraints."""
    runtimes = len(problem.demand)
    share, rest = divmod(problem.gpus, runtimes)
    return [*[share] * (runtimes - 1), share + rest]
