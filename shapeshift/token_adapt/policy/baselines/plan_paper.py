"""Algorithm 2 of OTAS, as printed and with its errors repaired.

For each batch and gamma, both keep only the combination of utility and clock with the highest utility. A combination
with less utility that ends earlier can lead to a better plan, so neither is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.token_adapt.policy.plan import SKIP, PlanProblem


def solve_printed(problem: PlanProblem, tick_ms: float = 0.0) -> list[int]:
    """Line by line, with index 0 read as "not executed". Batches of the plan can miss their deadline.

    `tick_ms` is unused.
    """
    batches, gammas = problem.times.shape
    shape = (batches + 1, gammas + 1)
    dp, s, c, j = np.zeros(shape), np.ones(shape, dtype=int), np.full(shape, problem.now), np.zeros(shape, dtype=bool)
    for b in range(1, batches + 1):
        for l in range(gammas + 1):  # noqa: E741  the paper's name
            for before in range(gammas + 1):
                if dp[b - 1, before] == -np.inf:
                    continue
                if l == 0:
                    if dp[b - 1, before] > dp[b, l]:
                        dp[b, l], s[b, l], c[b, l] = dp[b - 1, before], before, c[b - 1, before]
                        j[b, l] = True
                else:
                    end = c[b - 1, before] + problem.times[b - 1, l - 1]
                    if end < problem.deadlines[b - 1]:
                        utility = dp[b - 1, before] + problem.utilities[b - 1, l - 1]
                        j[b, l] = True
                        if utility > dp[b, l]:
                            dp[b, l], s[b, l], c[b, l] = utility, before, end
                if l > 0 and not j[b, l]:
                    dp[b, l], c[b, l] = -np.inf, np.inf
    return _backtrack(dp[batches], s)


def solve_repaired(problem: PlanProblem, tick_ms: float = 0.0) -> list[int]:
    """All rows are written, batches of utility 0 can run, and ties go to the earlier clock. `tick_ms` is unused."""
    batches, gammas = problem.times.shape
    shape = (batches + 1, gammas + 1)
    dp, s, c = np.full(shape, -np.inf), np.zeros(shape, dtype=int), np.full(shape, np.inf)
    dp[0, 0], c[0, 0] = 0.0, problem.now
    for b in range(1, batches + 1):
        for l in range(gammas + 1):  # noqa: E741  the paper's name
            for before in range(gammas + 1):
                if dp[b - 1, before] == -np.inf:
                    continue
                utility, end = dp[b - 1, before], c[b - 1, before]
                if l > 0:
                    utility, end = utility + problem.utilities[b - 1, l - 1], end + problem.times[b - 1, l - 1]
                    if not end < problem.deadlines[b - 1]:
                        continue
                if (utility, -end) > (dp[b, l], -c[b, l]):
                    dp[b, l], s[b, l], c[b, l] = utility, before, end
    return _backtrack(dp[batches], s)


def _backtrack(last: NDArray[Any], s: NDArray[Any]) -> list[int]:
    """Lines 33 to 37. The paper's indices start at 1; 0 means that the batch is not executed."""
    index = int(np.argmax(last))
    plan = [index]
    for b in range(len(s) - 1, 1, -1):
        index = int(s[b, index])
        plan.append(index)
    return [index - 1 if index else SKIP for index in reversed(plan)]
