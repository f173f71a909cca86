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
# Where many batches wait, a cell more or less is worth little beside the time that planning takes from the device.
_MOST_WORK, _FEWEST_CELLS = 40_000, 300
_FEW_BATCHES = 16


def solve(problem: PlanProblem, tick_ms: float) -> list[int]:
    """A plan of nearly the greatest utility, on ticks of at most `tick_ms` as far as horizon and queue allow.

    For more than 16 batches gammas are left out that two others mixed would better.
    """
    batches = len(problem.deadlines)
    times = problem.times
    if batches > _FEW_BATCHES:
        times = times.copy()
        _leave_out(problem.now, problem.deadlines, times, problem.utilities)
    horizon = min(float(problem.deadlines[-1]) - problem.now, _longest(times))
    if not horizon > 0.0:
        horizon = tick_ms
    most = max(min(_MOST_CELLS, _MOST_WORK // batches), _FEWEST_CELLS)
    cells = int(min(max(np.ceil(horizon / tick_ms), _LEAST_CELLS), most))
    chosen = np.empty(batches, dtype=np.int32)
    _fill(problem.now, problem.deadlines, times, problem.utilities, horizon / cells, cells + 2, chosen)
    return [int(gamma) for gamma in chosen]


def _longest(times: Floats) -> float:
    """The time of all batches at their slowest."""
    return float(np.where(np.isfinite(times), times, 0.0).max(axis=1).sum())


@compiled("void(f8, f8[::1], f8[:, ::1], f8[:, ::1])")
def _leave_out(now: float, deadlines: Floats, times: Floats, utilities: Floats) -> None:
    """Set the time of every gamma to infinity that is too slow for its batch's deadline or below the line between two
    others of its batch, of which one may be not to run it."""
    batches, gammas = times.shape
    took, worth = np.zeros(gammas + 1), np.zeros(gammas + 1)
    for b in range(batches):
        for g in range(gammas):
            if not now + times[b, g] < deadlines[b]:
                times[b, g] = np.inf
            took[g + 1], worth[g + 1] = times[b, g], utilities[b, g]
        for g in range(1, gammas + 1):
            for before in range(gammas + 1):
                if before == g or took[before] > took[g]:
                    continue
                gains, lasts = worth[g] - worth[before], took[g] - took[before]
                if gains < 0.0 or (gains == 0.0 and (lasts > 0.0 or before < g)):
                    times[b, g - 1] = np.inf
                    break
                for after in range(1, gammas + 1):
                    if took[g] < took[after] < np.inf and gains * (took[after] - took[before]) < lasts * (
                        worth[after] - worth[before]
                    ):
                        times[b, g - 1] = np.inf
                        break
                if times[b, g - 1] == np.inf:
                    break


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
