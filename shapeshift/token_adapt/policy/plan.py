"""The planning problem of OTAS, Eq. 1: which waiting batches run, and at which gamma; and its solvers by name.

Batches run one after another by deadline, which is optimal because all of them have arrived (Jackson's rule). A plan
is a list with the gamma index of each batch, or SKIP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shapeshift.settings import Choices

Floats = NDArray[np.float64]

SKIP = -1
TICK_MS = 1.0


@dataclass(frozen=True)
class PlanProblem:
    """One instance, for b batches and g gammas.

    now        clock, ms
    deadlines  [b] ms, non-decreasing
    times      [b, g] ms, inf where the gamma is not allowed
    utilities  [b, g] utility of each batch if it ends before its deadline; negative only after `with_shadow_price`
    """

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
        """A problem from lists; a gamma whose memory is not below `memory_limit` is not allowed (1c)."""
        gammas = len(times[0]) if times else 0
        allowed = np.array(times, dtype=np.float64).reshape(len(deadlines), gammas)
        if memory is not None and memory_limit is not None:
            needed = np.array(memory, dtype=np.float64).reshape(allowed.shape)
            allowed = np.where(needed < memory_limit, allowed, np.inf)
        values = np.array(utilities, dtype=np.float64).reshape(allowed.shape)
        return cls(float(now), np.array(deadlines, dtype=np.float64), allowed, values)

    def with_shadow_price(self, price: float) -> PlanProblem:
        """The same problem where each ms of execution costs `price` in utility."""
        net = self.utilities - price * np.where(np.isfinite(self.times), self.times, 0.0)
        return PlanProblem(self.now, self.deadlines, self.times, net)

    def utility(self, plan: Sequence[int]) -> float:
        """Total utility of a plan. A batch that would miss its deadline is skipped and takes no time."""
        clock, total = self.now, 0.0
        for batch, gamma in enumerate(plan):
            if gamma != SKIP and clock + self.times[batch, gamma] < self.deadlines[batch]:
                clock += float(self.times[batch, gamma])
                total += float(self.utilities[batch, gamma])
        return total


_POLICY = "shapeshift.token_adapt.policy"
# A solver receives the problem and the tick of the time grid in ms, which only `grid` uses.
ALGORITHMS: Choices[Callable[[PlanProblem, float], list[int]]] = Choices(
    "algorithm",
    {
        "grid": f"{_POLICY}.plan_grid:solve",
        "front": f"{_POLICY}.plan_pareto:solve",
        "paper": f"{_POLICY}.baselines.plan_paper:solve_repaired",
        "paper_printed": f"{_POLICY}.baselines.plan_paper:solve_printed",
    },
)


def solve(problem: PlanProblem, algorithm: str = "grid", tick_ms: float = TICK_MS) -> list[int]:
    """The plan of the named solver. Raises InvalidInputError for an unknown name."""
    if not problem.times.size:
        return [SKIP] * len(problem.deadlines)
    return ALGORITHMS[algorithm](problem, tick_ms)
