"""How many GPUs each static length gets: the solvers of `problem.Problem` by name, and what is done when they fail."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shapeshift.polymorph.problem import Problem


@dataclass(frozen=True)
class Allocation:
    """The answer to a `Problem`.

    counts: N_i; objective: Eq. 1 for them and the demand x theta; feasible: whether they keep the constraints
    for the whole demand; theta: the share of the demand that they are made for; solve_ms: time to solve.
    """

    counts: tuple[int, ...]
    objective: float
    feasible: bool
    theta: float
    solve_ms: float


Solver = Callable[[Problem], Sequence[int] | None]


def allocate(problem: Problem, algorithm: str = "exact") -> Allocation:
    """Divide the GPUs.

    Where the lower bounds exceed `gpus`, the counts are those for the demand scaled by theta = (G - 1) / sum of
    Q_i / M_i; where the cap alone cannot be met, they are those without it. Both are told by `feasible`. Of
    equally good counts, the longest runtime gets what is left over.
    Raises ValueError for latencies beyond a float's range, UnsupportedError where the solver cannot be used.
    """
    solver = ALGORITHMS[algorithm]()
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
    """G / I each, the remainder to the longest; demand and constraints are not looked at."""
    runtimes = len(problem.demand)
    share, rest = divmod(problem.gpus, runtimes)
    return [*[share] * (runtimes - 1), share + rest]


def _exact() -> Solver:
    # numba takes a second to import, which is no part of solving.
    from shapeshift.polymorph.allocate_exact import solve

    return solve


def _gurobi() -> Solver:
    from shapeshift.polymorph.allocate_gurobi import solve

    return solve


# `global` is the exact problem too: its caller gives the whole trace's demand, once.
ALGORITHMS: dict[str, Callable[[], Solver]] = {
    "exact": _exact,
    "gurobi": _gurobi,
    "even": lambda: even,
    "global": _exact,
}
