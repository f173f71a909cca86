"""The exact plan: batch by batch, all Pareto-optimal pairs of clock and utility."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shapeshift.token_adapt.policy.plan import SKIP, PlanProblem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def solve(problem: PlanProblem, tick_ms: float = 0.0) -> list[int]:
    """The plan with the highest utility; among equals, one that ends first. `tick_ms` is unused."""
    clocks, values = np.array([problem.now]), np.zeros(1)
    steps: list[tuple[Integers, Integers]] = []
    for deadline, times, utilities in zip(problem.deadlines, problem.times, problem.utilities, strict=True):
        ends = clocks + times[:, None]
        gammas, sources = np.nonzero(ends < deadline)
        ends = np.concatenate([clocks, ends[gammas, sources]])
        totals = np.concatenate([values, values[sources] + utilities[gammas]])
        undominated = _pareto_front(ends, totals)
        clocks, values = ends[undominated], totals[undominated]
        num_skipped = len(ends) - len(gammas)
        chosen = np.concatenate([np.full(num_skipped, SKIP), gammas])[undominated]
        previous = np.concatenate([np.arange(num_skipped), sources])[undominated]
        steps.append((chosen, previous))
    plan, state = [], len(values) - 1
    for chosen, previous in reversed(steps):
        plan.append(int(chosen[state]))
        state = int(previous[state])
    return plan[::-1]


def _pareto_front(clocks: Floats, values: Floats) -> Integers:
    """Indices of the undominated pairs, ascending in clock and value."""
    order = np.lexsort((-values, clocks))
    ranked = values[order]
    best_before = np.concatenate([[-np.inf], np.maximum.accumulate(ranked)[:-1]])
    undominated: Integers = order[ranked > best_before]
    return undominated
