"""The exact plan: all combinations of clock and utility that no other one betters, batch by batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shapeshift.token_adapt.plan import SKIP, PlanProblem

Integers = NDArray[np.int64]


def solve(problem: PlanProblem) -> list[int]:
    """The plan of the greatest utility; of equally good ones, one that ends first."""
    clocks, values = np.array([problem.now]), np.zeros(1)
    steps: list[tuple[Integers, Integers]] = []
    for deadline, times, utilities in zip(problem.deadlines, problem.times, problem.utilities, strict=True):
        ends = clocks + times[:, None]
        gammas, sources = np.nonzero(ends < deadline)
        ends = np.concatenate([clocks, ends[gammas, sources]])
        worth = np.concatenate([values, values[sources] + utilities[gammas]])
        kept = _undominated(ends, worth)
        clocks, values = ends[kept], worth[kept]
        skipped = len(ends) - len(gammas)
        chosen = np.concatenate([np.full(skipped, SKIP), gammas])[kept]
        came = np.concatenate([np.arange(skipped), sources])[kept]
        steps.append((chosen, came))
    plan, place = [], len(values) - 1
    for chosen, came in reversed(steps):
        plan.append(int(chosen[place]))
        place = int(came[place])
    return plan[::-1]


def _undominated(clocks: NDArray[np.float64], values: NDArray[np.float64]) -> Integers:
    """Indices of those that are worth more than all that are as early, in rising order of both."""
    order = np.lexsort((-values, clocks))
    ranked = values[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(ranked)[:-1]])
    kept: Integers = order[ranked > before]
    return kept
