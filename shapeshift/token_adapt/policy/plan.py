"""The solvers of the planning problem (`problem.PlanProblem`; OTAS, Eq. 1) by name."""

from __future__ import annotations

from collections.abc import Callable

from shapeshift.settings import Choices
from shapeshift.token_adapt.policy.problem import SKIP, PlanProblem

TICK_MS = 1.0

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
