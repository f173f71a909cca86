"""A plan on a time grid: of all combinations that end in the same tick, keep the one with the highest utility.

Each cell stores the exact clock of its combination, so plans meet their deadlines exactly. Against the Pareto front,
only combinations within one tick of each other are lost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapeshift.jit import njit
from shapeshift.token_adapt.policy.plan import PlanProblem

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]

# The loss depends on the number of ticks in a batch's time: short horizons get finer ticks, long ones coarser.
_MIN_CELLS, _MAX_CELLS = 1000, 2000
# With many waiting batches, finer ticks gain less than the time that planning them costs. But each batch may lose up to
# a tick: with less than 4 cells for each batch, some plans were below 0.994 of the optimum; with 6, none below 0.997.
_MAX_WORK, _CELLS_PER_BATCH = 40_000, 6


def solve(problem: PlanProblem, tick_ms: float) -> list[int]:
    """A plan of nearly the highest utility, on ticks of at most `tick_ms` as far as horizon and queue allow."""
    batches = len(problem.deadlines)
    times = problem.times.copy()
    _drop_dominated(problem.now, problem.deadlines, times, problem.utilities)
    horizon = min(float(problem.deadlines.max()) - problem.now, _total_time(times))
    if not horizon > 0.0:
        horizon = tick_ms
    max_cells = max(min(_MAX_CELLS, _MAX_WORK // batches), _CELLS_PER_BATCH * batches)
    cells = int(min(max(np.ceil(horizon / tick_ms), _MIN_CELLS, _CELLS_PER_BATCH * batches), max_cells))
    chosen = np.empty(batches, dtype=np.int32)
    _fill(problem.now, problem.deadlines, times, problem.utilities, horizon / cells, cells + 2, chosen)
    return [int(gamma) for gamma in chosen]


def _total_time(times: Floats) -> float:
    """Time of all batches at their slowest gamma."""
    return float(np.where(np.isfinite(times), times, 0.0).max(axis=1).sum())


@njit("void(f8, f8[::1], f8[:, ::1], f8[:, ::1])")
def _drop_dominated(now: float, deadlines: Floats, times: Floats, utilities: Floats) -> None:
    """Set the time of a gamma to inf if it misses the deadline, or if another option is as fast and worth as much.

    Not to run is an option too. What only a mixture of two options dominates stays: a plan cannot mix them.
    """
    batches, gammas = times.shape
    for b in range(batches):
        for g in range(gammas):
            if not now + times[b, g] < deadlines[b] or utilities[b, g] <= 0.0:
                times[b, g] = np.inf
                continue
            for other in range(gammas):
                saved_ms, gain = times[b, g] - times[b, other], utilities[b, other] - utilities[b, g]
                if saved_ms >= 0.0 and gain >= 0.0 and (saved_ms > 0.0 or gain > 0.0 or other < g):
                    times[b, g] = np.inf
                    break


@njit("void(f8, f8[::1], f8[:, ::1], f8[:, ::1], f8, i8, i4[::1])")
def _fill(
    now: float, deadlines: Floats, times: Floats, utilities: Floats, tick: float, cells: int, chosen: Integers
) -> None:
    """Write the plan to `chosen`. Cell c holds a clock in [now + c tick, now + (c + 1) tick), the last all later ones.

    The combinations kept after each batch ascend in clock and value.
    """
    batches, gammas = times.shape
    # Origin of each combination: index of the previous combination * options + option.
    origins = np.empty((batches, cells), dtype=np.int64)
    options, per_ms = gammas + 1, 1.0 / tick
    clock, value, cell_of = np.empty(cells), np.empty(cells), np.zeros(cells, dtype=np.int32)
    clock[0], value[0], count = now, 0.0, 1
    next_clock, next_value = np.full(cells, np.inf), np.full(cells, -1.0)
    origin = np.empty(cells, dtype=np.int64)
    for b in range(batches):
        last_cell = 0
        for k in range(count):
            last_cell = cell_of[k]
            next_clock[last_cell], next_value[last_cell], origin[last_cell] = clock[k], value[k], k * options
        for g in range(gammas):
            took, utility = times[b, g], utilities[b, g]
            for k in range(count):
                end = clock[k] + took
                if not end < deadlines[b]:
                    break
                cell = min(int((end - now) * per_ms), cells - 1)
                total = value[k] + utility
                if total > next_value[cell] or (total == next_value[cell] and end < next_clock[cell]):
                    next_clock[cell], next_value[cell], origin[cell] = end, total, k * options + g + 1
                    last_cell = max(last_cell, cell)
        count, best = 0, -1.0
        for cell in range(last_cell + 1):
            if next_value[cell] > best:
                best = next_value[cell]
                clock[count], value[count], cell_of[count] = next_clock[cell], best, cell
                origins[b, count] = origin[cell]
                count += 1
            next_clock[cell], next_value[cell] = np.inf, -1.0
    state = count - 1
    for back in range(batches):
        b = batches - 1 - back
        chosen[b] = origins[b, state] % options - 1
        state = origins[b, state] // options
