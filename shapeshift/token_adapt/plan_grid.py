"""The plan on a grid of time: of all combinations that end within the same tick, the one of the greatest utility.

Each cell keeps the exact clock of its combination, so that every plan keeps its deadlines, and what is lost against
the exact front is only what is given up within a tick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from shapeshift.token_adapt.plan import SKIP, PlanProblem

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]
F = TypeVar("F", bound=Callable[..., Any])

# A short horizon is cut finer than the tick, a very long one coarser: the first costs little, the second would much.
_LEAST_CELLS = 1000
_MOST_CELLS = 100_000
_MOST_STATES = 20_000_000


def solve(problem: PlanProblem, tick_ms: float) -> list[int]:
    """A plan of nearly the greatest utility, on ticks of at most `tick_ms` as far as the horizon allows."""
    finite = np.where(np.isfinite(problem.times), problem.times, 0.0)
    horizon = min(float(problem.deadlines[-1]) - problem.now, float(finite.max(axis=1).sum()))
    if not horizon > 0.0:
        horizon = tick_ms
    batches = len(problem.deadlines)
    most = max(_LEAST_CELLS, min(_MOST_CELLS, _MOST_STATES // batches))
    cells = int(min(max(np.ceil(horizon / tick_ms), _LEAST_CELLS), most))
    chosen = np.empty(batches, dtype=np.int32)
    _fill(problem.now, problem.deadlines, problem.times, problem.utilities, horizon / cells, cells + 2, chosen)
    return [int(gamma) for gamma in chosen]


def compiled(signature: str) -> Callable[[F], F]:
    """Compile with numba now; kept on disk where some folder takes it."""

    def wrap(function: F) -> F:
        try:
            return cast(F, numba.njit(signature, cache=True, error_model="numpy", nogil=True)(function))
        except RuntimeError:
            # Neither the package's folder nor the user's can be written.
            return cast(F, numba.njit(signature, error_model="numpy", nogil=True)(function))

    return wrap


@compiled("void(f8, f8[::1], f8[:, ::1], f8[:, ::1], f8, i8, i4[::1])")
def _fill(
    now: float, deadlines: Floats, times: Floats, utilities: Floats, tick: float, cells: int, chosen: Integers
) -> None:
    """Write the plan to `chosen`; cell c holds a clock in (now + (c - 1) tick, now + c tick], the last all later."""
    batches, gammas = times.shape
    choice = np.empty((batches, cells), dtype=np.int16)
    source = np.empty((batches, cells), dtype=np.int32)
    value, clock = np.full(cells, -1.0), np.full(cells, now)
    value[0] = 0.0
    last = 0
    for b in range(batches):
        next_value, next_clock = value.copy(), clock.copy()
        for c in range(last + 1):
            choice[b, c], source[b, c] = SKIP, c
        reached = last
        for c in range(last + 1):
            if value[c] < 0.0:
                continue
            for g in range(gammas):
                end = clock[c] + times[b, g]
                if not end < deadlines[b]:
                    continue
                cell = min(int(np.ceil((end - now) / tick)), cells - 1)
                worth = value[c] + utilities[b, g]
                if worth > next_value[cell] or (worth == next_value[cell] and end < next_clock[cell]):
                    next_value[cell], next_clock[cell] = worth, end
                    choice[b, cell], source[b, cell] = g, c
                    reached = max(reached, cell)
        best, last = -1.0, 0
        for c in range(reached + 1):
            if next_value[c] <= best:
                next_value[c] = -1.0
            else:
                best, last = next_value[c], c
        value, clock = next_value, next_clock
    place = last
    for back in range(batches):
        b = batches - 1 - back
        chosen[b] = choice[b, place]
        place = source[b, place]
