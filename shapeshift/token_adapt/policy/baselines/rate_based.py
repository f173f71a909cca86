"""Gammas by the arrival rate alone: Algorithm 3 of OTAS, its Table I, and the model selection of INFaaS."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from shapeshift.token_adapt.policy.costs import Costs

RateTable = Sequence[tuple[float, int]]
"""Table I: rows of (lowest rate, gamma) by ascending rate."""

PAPER_SHARE = 380.0 / 580.0
"""Share of a gamma's throughput up to which the paper uses it: Table I gives gamma 0 380/s, Fig. 4b 580/s."""
KAPPA = 0.8
"""Batches with a higher mean utility get the largest gamma."""


def rate_table(throughput: Mapping[int, float], share: float = PAPER_SHARE) -> list[tuple[float, int]]:
    """Table I from a profile: `throughput` in images a second by gamma.

    Each gamma is used up to `share` of its throughput, the largest gamma from rate 0. A gamma that is not faster than
    a larger one has no row.
    """
    rows: list[tuple[float, int]] = []
    fastest = 0.0
    for gamma in sorted(throughput, reverse=True):
        if not rows or throughput[gamma] > fastest:
            rows.append((share * fastest, gamma))
            fastest = throughput[gamma]
    return rows


def gamma_for_rate(rate: float, table: RateTable) -> int:
    """f(q): the gamma of the last row whose lowest rate is at most `rate`; below all rows, that of the first."""
    result = table[0][1]
    for lowest_rate, gamma in table:
        if lowest_rate <= rate:
            result = gamma
    return result


def allocate(
    now: float,
    rate: float,
    table: RateTable,
    gammas: Sequence[int],
    deadlines: Sequence[float],
    times: Sequence[Sequence[float]],
    mean_utilities: Sequence[float],
    kappa: float,
) -> list[int]:
    """Algorithm 3: an index into `gammas` for every batch, late ones included.

    times [b][g] and deadlines [b] in ms. A late batch gets the smallest gamma, a batch whose mean utility is above
    `kappa` the largest.
    """
    default = gammas.index(gamma_for_rate(rate, table))
    smallest, largest = gammas.index(min(gammas)), gammas.index(max(gammas))
    plan, clock = [], now
    for deadline, batch_times, mean_utility in zip(deadlines, times, mean_utilities, strict=True):
        chosen = largest if mean_utility > kappa else default
        if clock + batch_times[default] >= deadline:
            chosen = smallest
        clock += batch_times[chosen]
        plan.append(chosen)
    return plan


class ArrivalRate:
    """Arrivals a second over the last `window_ms`."""

    def __init__(self, window_ms: float = 1000.0) -> None:
        self._window_ms = window_ms
        self._arrivals: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, arrival: float) -> None:
        self._arrivals.append(arrival)
        self._drop_old(arrival)

    def at(self, now: float) -> float:
        self._drop_old(now)
        return len(self._arrivals) * 1000.0 / self._window_ms

    def _drop_old(self, now: float) -> None:
        while self._arrivals and self._arrivals[0] <= now - self._window_ms:
            self._arrivals.popleft()


class ByRate:
    """See `image_scheduler.Baseline`: Algorithm 3."""

    def __init__(self, costs: Costs) -> None:
        self._gammas = costs.gammas
        self._table = rate_table(costs.throughput(costs.max_size))
        self._arrival_rate = ArrivalRate()

    def add(self, arrival: float) -> None:
        self._arrival_rate.add(arrival)

    def plan(
        self,
        now: float,
        deadlines: Sequence[float],
        times: Sequence[Sequence[float]],
        mean_utilities: Sequence[float],
    ) -> list[int]:
        rate = self._arrival_rate.at(now)
        return allocate(now, rate, self._table, self._gammas, deadlines, times, mean_utilities, KAPPA)

    def only_gamma(self, now: float) -> int | None:
        return None


class Infaas(ByRate):
    """See `image_scheduler.Baseline`: one model for all batches, by the rate.

    It changes after the rate selects another one for `dwell_ms`.
    """

    def __init__(self, costs: Costs, dwell_ms: float = 1000.0) -> None:
        super().__init__(costs)
        self._dwell_ms = dwell_ms
        self._current: int | None = None
        self._other_since: float | None = None

    def only_gamma(self, now: float) -> int:
        target = gamma_for_rate(self._arrival_rate.at(now), self._table)
        if self._current is None:
            self._current = target
        if target == self._current:
            self._other_since = None
        elif self._other_since is None:
            self._other_since = now
        elif now - self._other_since >= self._dwell_ms:
            self._current, self._other_since = target, None
        return self._gammas.index(self._current)
