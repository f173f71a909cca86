"""The exact solution of Arlo's allocation problem (Eqs. 1-7) by dynamic programming over the runtimes.

What a runtime serves depends on the earlier runtimes only through the requests R that they hand on. A state is
therefore (runtime, GPUs used, R), and only the cheapest path to it is kept, for any latency curve. Where the curves
of all later runtimes rise, so that fewer requests never cost more, a state with both more R and more cost than
another is dropped too. Only the slack G - sum of the lower bounds is divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shapeshift.polymorph.policy.allocate_dp import Floats, Integers, advance, min_plus
from shapeshift.polymorph.policy.curves import encode
from shapeshift.polymorph.policy.problem import Problem

# The search looks for the optimum this far above the lower bound, one attempt after the other.
_MARGINS = (0.02, 0.2)
# Costs that differ only by rounding are a tie. A tie goes to the longest runtime.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class _States:
    """As `allocate_dp.advance` returns them."""

    first: Integers
    left: Floats
    cost: Floats
    parent: Integers

    def spent(self) -> Integers:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


def solve(problem: Problem) -> list[int] | None:
    """The best counts N_i; None where no counts meet the cap. The lower bounds must fit into the GPUs."""
    lower = problem.lower_bounds()
    slack = problem.gpus - sum(lower)
    demand, capacity = _exactly_summed(problem)
    to_go = _to_go(problem, lower, slack, demand, capacity)
    least = to_go[0][slack]
    # No state of a path that costs at most the ceiling is dropped.
    for ceiling in (*(least * (1.0 + margin) for margin in _MARGINS if least > -math.inf), math.inf):
        levels = _forward(problem, lower, slack, demand, capacity, to_go, ceiling)
        last = _best_end(problem, lower[-1], slack, demand[-1], capacity[-1], levels[-1])
        if last is not None and last[1] <= ceiling:
            return _trace(levels, last[0], lower, slack)
    return None


def _exactly_summed(problem: Problem) -> tuple[Floats, Floats]:
    # Multiples of one power of two: equal R computed in different orders are equal bit by bit. A capacity beyond
    # the whole demand is equivalent to any greater one.
    most = max(2.0 * sum(problem.demand), 1.0)
    quantum = 2.0 ** (math.frexp(most)[1] - 50)
    demand = np.round(np.asarray(problem.demand) / quantum) * quantum
    return demand, np.round(np.minimum(problem.capacity, most) / quantum) * quantum


def _to_go(problem: Problem, lower: Sequence[int], slack: int, demand: Floats, capacity: Floats) -> list[Floats]:
    """For each runtime and each remaining slack: the least cost of it and all longer runtimes if nothing is handed on.

    This is a lower bound where all these curves rise, and -infinity where one does not.
    """
    bounds: list[Floats] = []
    for index in reversed(range(len(lower))):
        workers = lower[index] + np.arange(slack + 1)
        served = np.full(slack + 1, demand[index])
        if bounds:
            served = np.minimum(served, workers * capacity[index])
        row = served * problem.curves[index].latencies(served / np.maximum(workers, 1))
        if not problem.curves[index].rising:
            row = np.full(slack + 1, -np.inf)
        bounds.insert(0, min_plus(row, bounds[0]) if bounds else row)
    return bounds


def _forward(
    problem: Problem,
    lower: Sequence[int],
    slack: int,
    demand: Floats,
    capacity: Floats,
    to_go: Sequence[Floats],
    ceiling: float,
) -> list[_States]:
    """The states before the first runtime, after it, and so on until the last but one."""
    coded = encode(problem.curves)
    first = np.ones(slack + 2, dtype=np.int64)
    first[0] = 0
    levels = [_States(first, np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64))]
    for index in range(len(lower) - 1):
        states, after = levels[-1], to_go[index + 1]
        following = advance(
            states.first,
            states.left,
            states.cost,
            demand[index],
            capacity[index],
            lower[index],
            coded.kinds[index],
            coded.values[coded.starts[index] : coded.starts[index + 1]],
            after[::-1].copy(),
            ceiling,
            after[0] > -math.inf,
        )
        levels.append(_States(*following))
    return levels


def _best_end(
    problem: Problem, lower: int, slack: int, demand: float, capacity: float, states: _States
) -> tuple[int, float] | None:
    """The state from which the last runtime, with all remaining GPUs, ends cheapest, and the total cost."""
    workers = lower + slack - states.spent()
    todo = states.left + demand
    total = states.cost + todo * problem.curves[-1].latencies(todo / workers)
    if problem.cap_last:
        total[todo > workers * capacity] = np.inf
    if not len(total) or not (least := float(total.min())) < math.inf:
        return None
    near: npt.NDArray[np.bool_] = total <= least + _ROUNDING * abs(least)
    return int(near.argmax()), least


def _trace(levels: Sequence[_States], state: int, lower: Sequence[int], slack: int) -> list[int]:
    counts: list[int] = []
    spent = slack
    for states, bound in zip(reversed(levels), reversed(lower), strict=True):
        before = int(np.searchsorted(states.first, state, side="right")) - 1
        counts.insert(0, bound + spent - before)
        spent, state = before, int(states.parent[state])
    return counts
