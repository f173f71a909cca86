"""What models did between two scrapes of the metrics page.

A process that has ended leaves its series at their last values, so only those whose heartbeat moves are alive.
A counter of a new process, or one that is smaller than before, has grown from 0.
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

TAIL = 0.98
# A heart that beat in this share of the seconds beat all the time; the rest is the metrics' own delay.
_STEADY = 0.9


@dataclass(frozen=True)
class Series:
    """One number of one process of a model; `label` is its `le` or `worker`, empty for neither."""

    name: str
    pid: int
    label: str
    value: float


class Page:
    """One scrape: the project's own series by model. `at` is the reader's monotonic clock, seconds."""

    def __init__(self, samples: Samples, at: float) -> None:
        self.at = at
        self.models: dict[str, list[Series]] = {}
        for (name, labels), value in samples.items():
            found = dict(labels)
            model, pid = found.get("model"), found.get("pid", "")
            if name.startswith("shapeshift_") and model and pid.isdecimal() and math.isfinite(value):
                label = found.get("le", found.get("worker", ""))
                self.models.setdefault(model, []).append(Series(name, int(pid), label, value))

    def series(self, model: str, name: str) -> Iterator[Series]:
        """The model's series of one metric."""
        return (one for one in self.models.get(model, ()) if one.name == name)

    def heartbeats(self) -> dict[str, dict[int, float]]:
        """Beats by model and process; models without a heartbeat are left out."""
        beats = {model: {one.pid: one.value for one in self.series(model, HEARTBEAT)} for model in self.models}
        return {model: found for model, found in beats.items() if found}


@dataclass(frozen=True)
class Load:
    """What one model did in `seconds`, the time in which it was alive.

    texts: texts offered by the upper bound of their bucket (tokens); answered: good answers; p98_ms: of these,
    None without any; waiting, running: texts at the end; outstanding, timeouts: by worker, at the end.
    live: processes whose heart beat; absent: metrics that the model does not export.
    """

    seconds: float
    texts: Mapping[float, float] = field(default_factory=dict)
    answered: float = 0.0
    p98_ms: float | None = None
    waiting: float = 0.0
    running: float = 0.0
    outstanding: Mapping[str, int] = field(default_factory=dict)
    timeouts: Mapping[str, int] = field(default_factory=dict)
    live: frozenset[int] = frozenset()
    absent: tuple[str, ...] = ()

    @property
    def offered(self) -> float:
        """Texts offered in all."""
        return sum(self.texts.values())


def load(model: str, old: Page, new: Page) -> Load:
    """What `model` did from the scrape `old` to the scrape `new`."""
    beats = _grown(model, HEARTBEAT, old, new)
    alive = frozenset(pid for pid, counts in beats.items() if counts.get("", 0.0) > 0)
    latencies = histogram(model, LATENCIES, old, new)
    exported = {one.name for one in new.models.get(model, ())}
    return Load(
        seconds=_seconds(new.at - old.at, sum(counts.get("", 0.0) for counts in beats.values())),
        texts=histogram(model, LENGTHS, old, new),
        answered=sum(latencies.values()),
        p98_ms=quantile(latencies, TAIL),
        waiting=sum(gauge(model, WAITING, new, alive).values()),
        running=sum(gauge(model, RUNNING, new, alive).values()),
        outstanding={worker: int(value) for worker, value in gauge(model, OUTSTANDING, new, alive).items()},
        timeouts={worker: int(value) for worker, value in gauge(model, TIMEOUTS, new, alive).items()},
        live=alive,
        absent=tuple(name for name in (HEARTBEAT, LENGTHS, LATENCIES) if name not in exported),
    )


def beats_between(model: str, old: Page, new: Page) -> bool:
    """Whether any process of the model was alive between the scrapes."""
    return any(counts.get("", 0.0) > 0 for counts in _grown(model, HEARTBEAT, old, new).values())


def gauge(model: str, name: str, page: Page, pids: Collection[int]) -> dict[str, float]:
    """The model's gauge by label, summed over the processes `pids`."""
    found: dict[str, float] = {}
    for one in page.series(model, name):
        if one.pid in pids:
            found[one.label] = found.get(one.label, 0.0) + one.value
    return found


def histogram(model: str, name: str, old: Page, new: Page) -> dict[float, float]:
    """How many observations fell into each bucket between the scrapes, by upper bound."""
    counts: dict[float, float] = {}
    for grown in _grown(model, name, old, new).values():
        below = 0.0
        for bound, total in sorted((_bound(label), value) for label, value in grown.items()):
            # A scrape may fall between the updates of two buckets, so a later one may seem to hold less.
            if not math.isnan(bound):
                counts[bound] = counts.get(bound, 0.0) + max(total - below, 0.0)
                below = max(below, total)
    return counts


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """The value below which `share` of the observations lie, straight within a bucket; None without any.

    Beyond the last finite bound the answer is that bound.
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    wanted, seen, lower = share * total, 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if math.isinf(bound):
            break
        if seen + count >= wanted:
            return lower + (bound - lower) * (wanted - seen) / count
        seen, lower = seen + count, bound
    return lower


def _grown(model: str, name: str, old: Page, new: Page) -> dict[int, dict[str, float]]:
    """By process and label: how much a counter has grown."""
    before: dict[int, dict[str, float]] = {}
    after: dict[int, dict[str, float]] = {}
    for page, found in ((old, before), (new, after)):
        for one in page.series(model, name):
            found.setdefault(one.pid, {})[one.label] = one.value
    for pid, counts in after.items():
        start = before.get(pid, {})
        # One number that fell means a new process: none of its counters goes on from the old one's.
        if any(value < start.get(label, 0.0) for label, value in counts.items()):
            start = {}
        after[pid] = {label: value - start.get(label, 0.0) for label, value in counts.items()}
    return after


def _seconds(window: float, beats: float) -> float:
    if beats <= 0 or beats >= _STEADY * window - 1.0:
        return max(window, 1e-9)
    return beats


def _bound(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan
