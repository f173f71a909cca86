"""What a model did between two scrapes of the metrics page.

A process that has ended leaves its series at their last values, so a process is alive only if its heartbeat moves.
A counter of a new process, or a counter that fell, has grown from 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shapeshift.triton.metrics import Samples

HEARTBEAT = "shapeshift_heartbeat_total"
LENGTHS = "shapeshift_request_tokens_bucket"
LATENCIES = "shapeshift_request_latency_ms_bucket"
WAITING = "shapeshift_requests_waiting"
RUNNING = "shapeshift_requests_running"
OUTSTANDING = "shapeshift_worker_outstanding"
TIMEOUTS = "shapeshift_worker_timeouts"
STALLED = "shapeshift_thread_stalled_seconds"

TAIL_QUANTILE = 0.98
_LABELS = ("le", "worker", "thread")
# One heartbeat a second. A model with heartbeats in this share of the seconds was alive all the time: Triton
# publishes the metrics with a delay.
_STEADY = 0.9


@dataclass(frozen=True)
class Series:
    """One value of one process of a model; `label` is its `le`, `worker` or `thread` label, or empty."""

    name: str
    pid: int
    label: str
    value: float


@dataclass(frozen=True)
class StalledThread:
    """A thread of a model's process that has work and does no step."""

    pid: int
    name: str


class MetricsPage:
    """One scrape: the series of this project by model. `at`: monotonic clock of the reader, seconds."""

    def __init__(self, samples: Samples, at: float) -> None:
        self.at = at
        self.models: dict[str, list[Series]] = {}
        for (name, labels), value in samples.items():
            found = dict(labels)
            model, pid = found.get("model"), found.get("pid", "")
            if name.startswith("shapeshift_") and model and pid.isdecimal() and math.isfinite(value):
                label = next((found[key] for key in _LABELS if key in found), "")
                self.models.setdefault(model, []).append(Series(name, int(pid), label, value))

    def series(self, model: str, name: str) -> Iterator[Series]:
        """The model's series of one metric."""
        return (series for series in self.models.get(model, ()) if series.name == name)

    def heartbeats(self) -> dict[str, dict[int, float]]:
        """The heartbeat counters by model and pid; models without a heartbeat are left out."""
        counts = {
            model: {series.pid: series.value for series in self.series(model, HEARTBEAT)} for model in self.models
        }
        return {model: found for model, found in counts.items() if found}

    def stalled(self) -> dict[str, dict[StalledThread, float]]:
        """By model: seconds without a step of each thread that has work, where above its limit; else 0."""
        return {
            model: {StalledThread(series.pid, series.label): series.value for series in self.series(model, STALLED)}
            for model in self.models
        }


@dataclass(frozen=True)
class Traffic:
    """What one model did in `seconds`, the time in which it was alive.

    texts: texts that arrived, by upper bound of the length bucket (tokens). answered: successful answers. p98_ms: of
    their latencies, None without answers. waiting, running: texts at the end. outstanding, timeouts: by worker, at the
    end. live_pids: processes whose heartbeat moved. missing: metrics that the model does not export.
    """

    seconds: float
    texts: Mapping[float, float] = field(default_factory=dict)
    answered: float = 0.0
    p98_ms: float | None = None
    waiting: float = 0.0
    running: float = 0.0
    outstanding: Mapping[str, int] = field(default_factory=dict)
    timeouts: Mapping[str, int] = field(default_factory=dict)
    live_pids: frozenset[int] = frozenset()
    missing: tuple[str, ...] = ()

    @property
    def offered(self) -> float:
        """Number of texts that arrived."""
        return sum(self.texts.values())


def traffic_of(model: str, old: MetricsPage, new: MetricsPage) -> Traffic:
    """What `model` did from the scrape `old` to the scrape `new`."""
    heartbeats = _increase(model, HEARTBEAT, old, new)
    alive = frozenset(pid for pid, counts in heartbeats.items() if counts.get("", 0.0) > 0)
    latencies = histogram(model, LATENCIES, old, new)
    exported = {series.name for series in new.models.get(model, ())}
    return Traffic(
        seconds=_alive_seconds(new.at - old.at, sum(counts.get("", 0.0) for counts in heartbeats.values())),
        texts=histogram(model, LENGTHS, old, new),
        answered=sum(latencies.values()),
        p98_ms=quantile(latencies, TAIL_QUANTILE),
        waiting=sum(gauge(model, WAITING, new, alive).values()),
        running=sum(gauge(model, RUNNING, new, alive).values()),
        outstanding={worker: int(value) for worker, value in gauge(model, OUTSTANDING, new, alive).items()},
        timeouts={worker: int(value) for worker, value in gauge(model, TIMEOUTS, new, alive).items()},
        live_pids=alive,
        missing=tuple(name for name in (HEARTBEAT, LENGTHS, LATENCIES) if name not in exported),
    )


def was_alive(model: str, old: MetricsPage, new: MetricsPage) -> bool:
    """Whether any process of the model was alive between the scrapes."""
    return any(counts.get("", 0.0) > 0 for counts in _increase(model, HEARTBEAT, old, new).values())


def gauge(model: str, name: str, page: MetricsPage, pids: Collection[int]) -> dict[str, float]:
    """The model's gauge by label, summed over the processes `pids`."""
    found: dict[str, float] = {}
    for series in page.series(model, name):
        if series.pid in pids:
            found[series.label] = found.get(series.label, 0.0) + series.value
    return found


def histogram(model: str, name: str, old: MetricsPage, new: MetricsPage) -> dict[float, float]:
    """The number of observations between the scrapes in each bucket, by its upper bound."""
    counts: dict[float, float] = {}
    for increase in _increase(model, name, old, new).values():
        below = 0.0
        for bound, total in sorted((_bound(label), value) for label, value in increase.items()):
            # A scrape can fall between the updates of two buckets, so that a later bucket seems to hold less.
            if not math.isnan(bound):
                counts[bound] = counts.get(bound, 0.0) + max(total - below, 0.0)
                below = max(below, total)
    return counts


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """The value below which `share` of the observations are, interpolated within a bucket; None without observations.

    At most the last finite bound.
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    target, seen, lower = share * total, 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if math.isinf(bound):
            break
        if seen + count >= target:
            return lower + (bound - lower) * (target - seen) / count
        seen, lower = seen + count, bound
    return lower


def _increase(model: str, name: str, old: MetricsPage, new: MetricsPage) -> dict[int, dict[str, float]]:
    """The increase of a counter by pid and label."""
    before: dict[int, dict[str, float]] = {}
    after: dict[int, dict[str, float]] = {}
    for page, found in ((old, before), (new, after)):
        for series in page.series(model, name):
            found.setdefault(series.pid, {})[series.label] = series.value
    for pid, counts in after.items():
        start = before.get(pid, {})
        # One counter that fell means a new process: all of its counters started from 0.
        if any(value < start.get(label, 0.0) for label, value in counts.items()):
            start = {}
        after[pid] = {label: value - start.get(label, 0.0) for label, value in counts.items()}
    return after


def _alive_seconds(window: float, heartbeats: float) -> float:
    if heartbeats <= 0 or heartbeats >= _STEADY * window - 1.0:
        return max(window, 1e-9)
    return heartbeats


def _bound(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan
