"""Which waiting batches run, and at which gamma: the problem of OTAS, Eq. 1, and its solvers by name.

Batches run one after another by deadline, which is optimal as all of them are there (Jackson's rule). A plan holds
the index of each batch's gamma, or SKIP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SKIP = -1
TICK_MS = 1.0


@dataclass(frozen=True)
class PlanProblem:
    """now: clock, ms; deadlines [b] ms, not falling; times [b, g] ms, inf where a gamma is not allowed;
    utilities [b, g]: what each batch brings at each gamma if it ends before its deadline; below 0 only where its time
    has a price."""

    now: float
    deadlines: Floats
    times: Floats
    utilities: Floats

    @classmethod
    def of(
        cls,
        now: float,
        deadlines: Sequence[float],
        times: Sequence[Sequence[float]],
        utilities: Sequence[Sequence[float]],
        memory: Sequence[Sequence[float]] | None = None,
        memory_limit: float | None = None,
    ) -> PlanProblem:
        """The problem of plain lists; a gamma whose memory reaches the limit is not allowed (1c)."""
        gammas = len(times[0]) if times else 0
        allowed = np.array(times, dtype=np.float64).reshape(len(deadlines), gammas)
        if memory is not None and memory_limit is not None:
            needed = np.array(memory, dtype=np.float64).reshape(allowed.shape)
            allowed = np.where(needed < memory_limit, allowed, np.inf)
        worth = np.array(utilities, dtype=np.float64).reshape(allowed.shape)
        return cls(float(now), np.array(deadlines, dtype=np.float64), allowed, worth)

    def priced(self, price: float) -> PlanProblem:
        """The same where each ms of execution costs `price` in utility; utilities can be below 0."""
        worth = self.utilities - price * np.where(np.isfinite(self.times), self.times, 0.0)
        return PlanProblem(self.now, self.deadlines, self.times, worth)

    def utility(self, plan: Sequence[int]) -> float:
        """What a plan brings: a batch that would not end before its deadline is left out and takes no time."""
        clock, total = self.now, 0.0
        for batch, gamma in enumerate(plan):
            if gamma != SKIP and clock + self.times[batch, gamma] < self.deadlines[batch]:
                clock += float(self.times[batch, gamma])
                total += float(self.utilities[batch, gamma])
        return total


Solver = Callable[[PlanProblem], list[int]]


def solve(problem: PlanProblem, algorithm: str = "grid", tick_ms: float = TICK_MS) -> list[int]:
    """The plan of the solver of that name; `tick_ms` is for `grid`."""
    if not problem.times.size:
        return [SKIP] * len(problem.deadlines)
    return ALGORITHMS[algorithm](tick_ms)(problem)


def _grid(tick_ms: float) -> Solver:
    # numba takes a second to import, which is no part of planning.
    from shapeshift.token_adapt.plan_grid import solve as on_grid

    return lambda problem: on_grid(problem, tick_ms)


def _front(tick_ms: float) -> Solver:
    from shapeshift.token_adapt.plan_front import solve as exact

    return exact


def _paper(tick_ms: float) -> Solver:
    from shapeshift.token_adapt.plan_paper import solve_repaired

    return solve_repaired


def _paper_printed(tick_ms: float) -> Solver:
    from shapeshift.token_adapt.plan_paper import solve_printed

    return solve_printed


ALGORITHMS: dict[str, Callable[[float], Solver]] = {
    "grid": _grid,
    "front": _front,
    "paper": _paper,
    "paper_printed": _paper_printed,
}
