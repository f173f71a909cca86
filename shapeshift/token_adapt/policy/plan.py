"""The planning problem of OTAS, Eq. 1: which waiting batches run, and at which gamma; the price of device time that
it is solved with; and its solvers by name.

Batches run one after another by deadline, which is optimal because all of them have arrived (Jackson's rule); those of
a more urgent class run before. A plan is a list with the gamma index of each batch, or SKIP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shapeshift.settings import Choices

Floats = NDArray[np.float64]

SKIP = -1
TICK_MS = 1.0
# Of the shadow price.
_REFRESH_MS, _BISECTIONS = 100.0, 16


@dataclass(frozen=True)
class PlanProblem:
    """One instance, for b batches and g gammas.

    now        clock, ms
    deadlines  [b] ms, in the order in which the batches run
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


class ShadowPrice:
    """The shadow price of device time, in utility per ms: what a plan for the waiting images takes from future ones.

    It is the price at which the arrivals of the last `window_ms`, if all were present at once, would exactly fill the
    window. Each arrival takes the gamma with the highest utility minus time times price, or none: the dual of Eq. 1
    without deadlines. The price is 0 when the window has time for the best gamma of each arrival.
    """

    def __init__(self, window_ms: float) -> None:
        self._window_ms = window_ms
        self._arrivals: deque[tuple[float, Floats]] = deque()
        self._price = 0.0
        self._refresh_at = -np.inf

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, arrival: float, utilities: Floats) -> None:
        """Record an arrival; utilities [g]: its expected utility at each gamma."""
        self._drop_old(arrival)
        self._arrivals.append((arrival, utilities))

    def at(self, now: float, times: Floats) -> float:
        """The price now; it is recomputed every 100 ms. times [g]: device ms of one image at each gamma."""
        if now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_MS
            self._drop_old(now)
            self._price = self._computed(times)
        return self._price

    def _drop_old(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now - self._window_ms:
            self._arrivals.popleft()

    def _computed(self, times: Floats) -> float:
        if not self._arrivals:
            return 0.0
        # Option 0 is not to run the image.
        options = np.concatenate(([0.0], times))
        utilities = np.zeros((len(self._arrivals), len(options)))
        utilities[:, 1:] = [one for _, one in self._arrivals]

        def fits(price: float) -> bool:
            return float(options[np.argmax(utilities - price * options, axis=1)].sum()) <= self._window_ms

        if fits(0.0):
            return 0.0
        low, high = 0.0, float((utilities[:, 1:] / times).max())
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high
