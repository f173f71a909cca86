"""What a model did between two scrapes of the metrics page.

A process that has ended leaves its series at their last values, so a process is alive only if its heartbeat moves.
A counter of a new process, or a counter that fell, has grown from 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeVar

from shapeshift.triton.metrics import HEARTBEAT, Labels, Samples
from shapeshift.triton.names import qualified, split

LENGTHS = "shapeshift_request_tokens_bucket"
LATENCIES = "shapeshift_request_latency_ms_bucket"
WAITING = "shapeshift_requests_waiting"
RUNNING = "shapeshift_requests_running"
OUTSTANDING = "shapeshift_worker_outstanding"
TIMEOUTS = "shapeshift_worker_timeouts"
STALLED = "shapeshift_thread_stalled_seconds"
PENDING = "nv_inference_pending_request_count"
DONE = ("nv_inference_request_success", "nv_inference_request_failure")

K = TypeVar("K")

TAIL_QUANTILE = 0.98
# With this the names of all metrics of this project begin.
_OURS = "shapeshift_"
_KEPT_LABELS = 1 << 17
_LABELS = ("le", "worker", "thread", "engine", "gamma", "outcome", "adapter", "level")
# What shows a technique at work: the metric without prefix, and the words for it.
_WORK = {
    "engines_loaded": "engines loaded",
    "engine_used_total": "calls of engine",
    "engine_seconds_total": "s in engine",
    "gamma_images_total": "images at gamma",
    "images_total": "images",
    "slots": "slots",
    "kv_cache_usage": "of the KV cache",
    "adapters_resident": "adapters in memory",
    "adapter_hits_total": "adapter hits",
    "adapter_misses_total": "adapter misses",
    "level_texts_total": "texts ended at level",
    "fallbacks_total": "texts kept an earlier answer",
}
# One heartbeat a second. A model with heartbeats in this share of the seconds was alive all the time: Triton
# publishes the metrics with a delay.
_STEADY = 0.9
# Machines count their processes from 1; this is above every pid of Linux.
_PIDS_PER_HOST = 1 << 32


def own_pid(number: int) -> int:
    """The pid on its machine of the process with this number, which is another one for each process of a fleet."""
    return number % _PIDS_PER_HOST


def listed(numbers: Iterable[int]) -> str:
    """`process 12, 34`: the processes with these numbers, by their pids."""
    return f"process {', '.join(str(own_pid(number)) for number in numbers)}"


class Series(NamedTuple):
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


class ServerCounts(NamedTuple):
    """What the server itself counts of a model: requests that wait in its queue now, and requests that have ended."""

    pending: float = 0.0
    done: float = 0.0


class MetricsPage:
    """One scrape: the series of this project by model. `at`: monotonic clock of the reader, seconds.

    node: the node that was scraped; models and workers get qualified names. host: a number of its own for each machine
    whose processes are not visible here. nodes: those that answered this scrape. counts: by model, of every model that
    the server has loaded since its start.
    """

    def __init__(self, samples: Samples, at: float, node: str = "", host: int = 0) -> None:
        self.at = at
        self.nodes = frozenset({node})
        self.models: dict[str, list[Series]] = {}
        self.counts: dict[str, ServerCounts] = {}
        for (name, labels), value in samples.items():
            if name == PENDING or name in DONE:
                self._count(qualified(node, dict(labels).get("model", "")), name, value)
            owner = _owner(labels, node, host) if name.startswith(_OURS) and math.isfinite(value) else None
            if owner is not None:
                model, pid, label = owner
                self.models.setdefault(model, []).append(Series(name, pid, label, value))

    @classmethod
    def joined(cls, pages: Iterable[MetricsPage], at: float, nodes: frozenset[str]) -> MetricsPage:
        """One page of several nodes, of which `nodes` answered now."""
        page_of_all = cls({}, at)
        page_of_all.nodes = nodes
        for page in pages:
            page_of_all.models |= page.models
            page_of_all.counts |= page.counts
        return page_of_all

    def _count(self, model: str, name: str, value: float) -> None:
        # Each version of a model and each reason of a failure has a series.
        pending, done = self.counts.get(model, ServerCounts())
        is_pending = name == PENDING
        self.counts[model] = ServerCounts(pending + value * is_pending, done + value * (not is_pending))

    def series(self, model: str, name: str) -> Iterator[Series]:
        """The model's series of one metric."""
        return (series for series in self.models.get(model, ()) if series.name == name)

    def heartbeats(self) -> dict[str, dict[int, float]]:
        """The heartbeat counters by model and pid; models without a heartbeat are left out."""
        counts = {
            model: {series.pid: series.value for series in self.series(model, HEARTBEAT)} for model in self.models
        }
        return {model: beats for model, beats in counts.items() if beats}

    def stalled(self) -> dict[str, dict[StalledThread, float]]:
        """By model: seconds without a step of each thread that has work, where above its limit; else 0."""
        return {
            model: {StalledThread(series.pid, series.label): series.value for series in self.series(model, STALLED)}
            for model in self.models
        }


def work_of(page: MetricsPage, model: str, pids: Collection[int]) -> dict[str, float]:
    """What the model's processes `pids` did, or hold, by the words for it; nothing of what they never did."""
    work: dict[str, float] = {}
    for name, words in _WORK.items():
        for series in page.series(model, f"{_OURS}{name}"):
            if series.pid in pids and series.value:
                what = f"{words} {series.label}".strip()
                work[what] = work.get(what, 0.0) + series.value
    return work


# Each page has the labels of the page before.
@lru_cache(maxsize=_KEPT_LABELS)
def _owner(labels: Labels, node: str, host: int) -> tuple[str, int, str] | None:
    """Model, process and label of a series; None if it is of no process of a model."""
    values = dict(labels)
    model, pid = values.get("model"), values.get("pid", "")
    if not model or not pid.isdecimal():
        return None
    label = next((values[key] for key in _LABELS if key in values), "")
    if node and "worker" in values and not split(label)[0]:
        label = qualified(node, label)
    return qualified(node, model), host * _PIDS_PER_HOST + int(pid), label


@dataclass(frozen=True)
class Traffic:
    """What one front did in `seconds`, the time in which it was alive.

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


def traffic_of(models: Sequence[str], old: MetricsPage, new: MetricsPage) -> Traffic:
    """What `models`, the front models of one front, did together from the scrape `old` to the scrape `new`."""
    beats = [_increase(model, HEARTBEAT, old, new) for model in models]
    alive = frozenset(pid for increase in beats for pid, counts in increase.items() if counts.get("", 0.0) > 0)
    seconds = [sum(counts.get("", 0.0) for counts in increase.values()) for increase in beats]
    latencies = _total(histogram(model, LATENCIES, old, new) for model in models)
    exported = {series.name for model in models for series in new.models.get(model, ())}

    def last(name: str) -> dict[str, float]:
        return _total(gauge(model, name, new, alive) for model in models)

    return Traffic(
        seconds=_alive_seconds(new.at - old.at, max(seconds, default=0.0)),
        texts=_total(histogram(model, LENGTHS, old, new) for model in models),
        answered=sum(latencies.values()),
        p98_ms=quantile(latencies, TAIL_QUANTILE),
        waiting=sum(last(WAITING).values()),
        running=sum(last(RUNNING).values()),
        outstanding={worker: int(value) for worker, value in last(OUTSTANDING).items()},
        timeouts={worker: int(value) for worker, value in last(TIMEOUTS).items()},
        live_pids=alive,
        missing=tuple(name for name in (HEARTBEAT, LENGTHS, LATENCIES) if name not in exported),
    )


def was_alive(model: str, old: MetricsPage, new: MetricsPage) -> bool:
    """Whether any process of the model was alive between the scrapes."""
    return any(counts.get("", 0.0) > 0 for counts in _increase(model, HEARTBEAT, old, new).values())


def gauge(model: str, name: str, page: MetricsPage, pids: Collection[int]) -> dict[str, float]:
    """The model's gauge by label, summed over the processes `pids`."""
    values: dict[str, float] = {}
    for series in page.series(model, name):
        if series.pid in pids:
            values[series.label] = values.get(series.label, 0.0) + series.value
    return values


def timeouts_in_a_row(page: MetricsPage, living: Collection[int]) -> dict[str, int]:
    """By worker, the most unanswered requests in a row that any front with a process in `living` counts.

    A front that no worker of another node answers cannot reach that node: this says nothing about its workers.
    """
    most: dict[str, int] = {}
    for front in page.models:
        counts = gauge(front, TIMEOUTS, page, living)
        for worker, count in counts.items():
            if worker and not _is_unreachable(split(worker)[0], split(front)[0], counts):
                most[worker] = max(most.get(worker, 0), int(count))
    return most


def _is_unreachable(node: str, front_node: str, counts: Mapping[str, float]) -> bool:
    return node != front_node and all(count > 0 for worker, count in counts.items() if split(worker)[0] == node)


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


def _total(parts: Iterable[Mapping[K, float]]) -> dict[K, float]:
    """The sum of the parts by key."""
    sums: dict[K, float] = {}
    for part in parts:
        for key, value in part.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums


def _increase(model: str, name: str, old: MetricsPage, new: MetricsPage) -> dict[int, dict[str, float]]:
    """The increase of a counter by pid and label."""
    before: dict[int, dict[str, float]] = {}
    after: dict[int, dict[str, float]] = {}
    for page, counters in ((old, before), (new, after)):
        for series in page.series(model, name):
            counters.setdefault(series.pid, {})[series.label] = series.value
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
