"""The figures of runs over many adapters, and their tables by system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.common.output import Row, table

PLAIN, CACHE, ORDER = "fifo, no cache", "fifo, cache", "arrival, no cache"
DEFAULT, QUEUES = "arrival, cache (default)", "chameleon, cache"
WARM = 0.1
"""The share of a run's first requests whose latencies are not counted."""
_DRAWS = 1000
_COUNTS = ("loaded_bytes", "hits", "misses", "span_s")


@dataclass(frozen=True)
class AdapterRun:
    """One system's run of n requests, in order of arrival.

    first_s, last_s  float64 [n], arrival to the first and the last token
    between_s   float64, between consecutive tokens, of all requests
    loaded_bytes, hits, misses  of the adapter cache
    span_s      from the first arrival to the last token
    """

    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    between_s: NDArray[np.float64]
    loaded_bytes: float
    hits: float
    misses: float
    span_s: float

    @property
    def steady_s(self) -> NDArray[np.float64]:
        """`first_s` of the requests that count."""
        return self.first_s[int(len(self.first_s) * WARM) :]


Runs = Sequence[AdapterRun]


def typical(runs: Runs) -> AdapterRun:
    """Runs of the same requests as one: the median times of each request, the means of the counters.

    A period in which the machine is slow counts only if it hits the same requests in most runs.
    """
    return AdapterRun(
        np.median([run.first_s for run in runs], axis=0),
        np.median([run.last_s for run in runs], axis=0),
        np.concatenate([run.between_s for run in runs]),
        *(float(np.mean([getattr(run, name) for run in runs])) for name in _COUNTS),
    )


def first_ms(runs: Runs, percent: float) -> float:
    """A percentile of the time to the first token over all runs."""
    return float(np.percentile(np.concatenate([run.steady_s for run in runs]), percent)) * 1e3


def served_per_s(runs: Runs) -> float:
    return sum(len(run.first_s) for run in runs) / sum(run.span_s for run in runs)


def record(runs: Runs) -> dict[str, float]:
    """The figures of a system under one load."""
    between_ms = np.concatenate([run.between_s for run in runs]) * 1e3
    hits, misses = sum(run.hits for run in runs), sum(run.misses for run in runs)
    requests = sum(len(run.first_s) for run in runs)
    return {
        "runs": len(runs),
        "first_p50_ms": first_ms(runs, 50),
        "first_p99_ms": first_ms(runs, 99),
        "between_p50_ms": float(np.percentile(between_ms, 50)),
        "between_p99_ms": float(np.percentile(between_ms, 99)),
        "mb_per_request": sum(run.loaded_bytes for run in runs) / requests / 2**20,
        "hit_ratio": hits / max(1, hits + misses),
        "longest_s": max(float(run.first_s.max()) for run in runs),
        "served_per_s": served_per_s(runs),
    }


def systems_table(title: str, systems: Mapping[str, Runs]) -> str:
    """A line for each system under one load."""
    return table(title, [{"system": name, **record(runs)} for name, runs in systems.items()])


def ratios(ours: Runs, theirs: Runs) -> list[Row]:
    """The median and the 99th percentile of the time to the first token, ours over theirs, with intervals."""
    rows: list[Row] = []
    for percent in (50, 99):
        value, low, high = ratio(ours, theirs, percent)
        rows.append({"first token": f"p{percent}", "ratio": value, "low": low, "high": high})
    return rows


def ratio(ours: Runs, theirs: Runs, percent: float, seed: int = 0) -> tuple[float, float, float]:
    """A percentile of ours over theirs, with its bootstrap interval of 95%.

    Runs, and requests within a run, are resampled, the same ones of both: requests of one run delay each other, and the
    machine may be slow during a whole run.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(_DRAWS):
        runs = rng.integers(0, len(ours), len(ours))
        rows = [(run, rng.integers(0, len(size), len(size))) for run in runs.tolist() for size in [ours[run].steady_s]]
        one, other = (
            np.percentile(np.concatenate([side[run].steady_s[places] for run, places in rows]), percent)
            for side in (ours, theirs)
        )
        drawn.append(one / other)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return first_ms(ours, percent) / first_ms(theirs, percent), float(low), float(high)


def geometric_mean(ratios: NDArray[np.float64], seed: int = 0) -> tuple[float, float, float]:
    """The geometric mean of the ratios of independent draws, with its bootstrap interval of 95%."""
    logs = np.log(ratios)
    drawn = np.random.default_rng(seed).choice(logs, (_DRAWS, len(logs))).mean(axis=1)
    low, high = np.exp(np.percentile(drawn, [2.5, 97.5]))
    return float(np.exp(logs.mean())), float(low), float(high)
