"""Gammas by the rate of arrivals alone: Algorithm 3 of OTAS, its table, and INFaaS' choice of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

Table = Sequence[tuple[float, int]]
"""Rows of (least rate, gamma), the rates rising: Table I."""

PAPER_SHARE = 380.0 / 580.0
"""Share of its throughput up to which the paper uses a gamma: Table I gives 380/s to gamma 0, Fig. 4b 580/s."""


def table(throughput: Mapping[int, float], share: float = PAPER_SHARE) -> list[tuple[float, int]]:
    """Table I of a profile: `throughput` in images a second by gamma.

    Each gamma serves up to `share` of its throughput, the greatest gamma from rate 0 on. One that is not faster than
    a greater gamma has no row.
    """
    rows: list[tuple[float, int]] = []
    fastest = 0.0
    for gamma in sorted(throughput, reverse=True):
        if not rows or throughput[gamma] > fastest:
            rows.append((share * fastest, gamma))
            fastest = throughput[gamma]
    return rows


def gamma_at(rate: float, rows: Table) -> int:
    """f(q): the gamma of the last row whose least rate is at most `rate`, of the first row below all."""
    found = rows[0][1]
    for least, gamma in rows:
        if least <= rate:
            found = gamma
    return found


def allocate(
    now: float,
    rate: float,
    rows: Table,
    gammas: Sequence[int],
    deadlines: Sequence[float],
    times: Sequence[Sequence[float]],
    mean_utilities: Sequence[float],
    kappa: float,
) -> list[int]:
    """Algorithm 3: an index into `gammas` for each batch, those that will be late among them.

    times [b][g] and deadlines in ms; a batch that would be late gets the least gamma, one whose queries are worth
    more than `kappa` on average the greatest.
    """
    usual, least, most = gammas.index(gamma_at(rate, rows)), gammas.index(min(gammas)), gammas.index(max(gammas))
    plan, clock = [], now
    for deadline, own, worth in zip(deadlines, times, mean_utilities, strict=True):
        in_time = most if worth > kappa else usual
        chosen = least if clock + own[usual] >= deadline else in_time
        clock += own[chosen]
        plan.append(chosen)
    return plan


class RateWindow:
    """Arrivals a second over the last `span_ms`."""

    def __init__(self, span_ms: float = 1000.0) -> None:
        self._span_ms = span_ms
        self._arrivals: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, arrived: float) -> None:
        self._arrivals.append(arrived)
        self._forget(arrived)

    def rate(self, now: float) -> float:
        self._forget(now)
        return len(self._arrivals) * 1000.0 / self._span_ms

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0] <= now - self._span_ms:
            self._arrivals.popleft()


class SteadyChoice:
    """INFaaS: one model for all, by the rate; it changes once the rate has asked for another for `dwell_ms`."""

    def __init__(self, rows: Table, dwell_ms: float = 1000.0) -> None:
        self._rows = rows
        self._dwell_ms = dwell_ms
        self._chosen: int | None = None
        self._other_since: float | None = None

    def choose(self, now: float, rate: float) -> int:
        """The model (as a gamma) to serve with now."""
        wanted = gamma_at(rate, self._rows)
        if self._chosen is None:
            self._chosen = wanted
        if wanted == self._chosen:
            self._other_since = None
        elif self._other_since is None:
            self._other_since = now
        elif now - self._other_since >= self._dwell_ms:
            self._chosen, self._other_since = wanted, None
        return self._chosen
