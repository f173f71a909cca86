"""What a simulated system did with a load, in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.workloads.trace import Trace

TAIL = 98.0
_PERCENTS = (50.0, TAIL, 99.0)


@dataclass(frozen=True)
class Outcome:
    """figures: a row of the table; latency_ms: of each request, nan without an answer; plans: as (seconds, words)."""

    figures: Mapping[str, object]
    latency_ms: NDArray[np.float64]
    plans: Sequence[tuple[float, str]] = ()


def latencies(latency_ms: NDArray[np.float64], prefix: str = "") -> dict[str, object]:
    """Mean and percentiles of what was answered; nothing where nothing was."""
    answered = latency_ms[~np.isnan(latency_ms)]
    if not len(answered):
        return {}
    percentiles = np.percentile(answered, _PERCENTS).tolist()
    named = {f"{prefix}p{percent:g} ms": value for percent, value in zip(_PERCENTS, percentiles, strict=True)}
    return {f"{prefix}mean ms": float(answered.mean()), **named}


def in_time(latency_ms: NDArray[np.float64], trace: Trace, objective_ms: float = 0.0) -> NDArray[np.bool_]:
    """Of each request, whether its answer came within its `latency_ms`, or where it has none within the objective."""
    limits = np.where(trace.latency_ms > 0, trace.latency_ms, objective_ms or np.inf)
    return np.nan_to_num(latency_ms, nan=np.inf) <= limits


def timeliness(timely: NDArray[np.bool_], trace: Trace) -> dict[str, object]:
    """The share of the requests that were answered in time, and that of their worth."""
    # Where nothing is worth anything, nothing of it was got.
    return {
        "in time": float(timely.mean()),
        "utility": float(timely @ trace.utility) / (float(trace.utility.sum()) or 1.0),
    }


def shares(outcome: NDArray[np.integer[Any]], names: Sequence[str]) -> dict[str, object]:
    """The share of each outcome, of those that there are."""
    counts = np.bincount(outcome, minlength=len(names)) / max(1, len(outcome))
    return {name: float(share) for name, share in zip(names, counts, strict=True) if share}
