"""The plan on a grid of time: of all combinations that end within the same tick, the one of the greatest utility.

Each cell keeps the exact clock of its combination, so that every plan keeps its deadlines, and what is lost against
the exact front is only what is given up within a tick.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapeshift.compiled import compiled
from shapeshift.token_adapt.plan import PlanProblem

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]

# A short horizon is cut finer than asked and a long one coarser: what is lost depends on the ticks in a batch's time.
_LEAST_CELLS, _MOST_CELLS = 1000, 2000


def solve(problem: PlanProblem, tick_ms: float) -> list[int]:
    """A plan of nearly the greatest utility, on ticks of at most `tick_ms` as far as the horizon allows."""
    finite = np.where(np.isfinite(problem.times), problem.times, 0.0)
    horizon = min(float(problem.deadlines[-1]) - problem.now, float(finite.max(axis=1).sum()))
    if not horizon > 0.0:
        horizon = tick_ms
    cells = int(min(max(np.ceil(horizon / tick_ms), _LEAST_CELLS), _MOST_CELLS))
    chosen = np.empty(len(problem.deadlines), dtype=np.int32)
    _fill(problem.now, problem.deadlines, problem.times, problem.utilities, horizon / cells, cells + 2, chosen)
    return [int(gamma) for gamma in chosen]


@compiled("void(f8, f8[::1], f8[:, ::1], f8[:, ::1], f8, i8, i4[::1])")
def _fill(
    now: float, deadlines: Floats, times: Floats, utilities: Floats, tick: float, cells: int, chosen: Integers
) -> None:
    """Write the plan to `chosen`; cell c holds a clock in [now + c tick, now + (c + 1) tick), the last all later.

    What is left of a batch are combinations in rising order of clock and worth.
    """
    batches, gammas = times.shape
    came = np.empty((batches, cells), dtype=np.int64)  # of each combination: the one before, times options, plus choice
    options, per_ms = gammas + 1, 1.0 / tick
    clock, worth, cell_of = np.empty(cells), np.empty(cells), np.zeros(cells, dtype=np.int32)
    clock[0], worth[0], count = now, 0.0, 1
    next_clock, next_worth = np.full(cells, np.inf), np.full(cells, -1.0)
    origin = np.empty(cells, dtype=np.int64)
    for b in range(batches):
        reached = 0
        for k in range(count):
            reached = cell_of[k]
            next_clock[reached], next_worth[reached], origin[reached] = clock[k], worth[k], k * options
        for g in range(gammas):
            took, brings = times[b, g], utilities[b, g]
            for k in range(count):
                end = clock[k] + took
                if not end < deadlines[b]:
                    break
                cell = min(int((end - now) * per_ms), cells - 1)
                total = worth[k] + brings
                if total > next_worth[cell] or (total == next_worth[cell] and end < next_clock[cell]):
                    next_clock[cell], next_worth[cell], origin[cell] = end, total, k * options + g + 1
                    reached = max(reached, cell)
        count, best = 0, -1.0
        for cell in range(reached + 1):
            if next_worth[cell] > best:
                best = next_worth[cell]
                clock[count], worth[count], cell_of[count] = next_clock[cell], best, cell
                came[b, count] = origin[cell]
                count += 1
            next_clock[cell], next_worth[cell] = np.inf, -1.0
    place = count - 1
    for back in range(batches):
        b = batches - 1 - back
        chosen[b] = came[b, place] % options - 1
        place = came[b, place] // options
