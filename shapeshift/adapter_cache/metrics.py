"""The metrics of the adapter cache, of the running and waiting adapters, and of size queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shapeshift.adapter_cache.interfaces import SizeQueueStats
from shapeshift.serving.metrics import OTHER, Counter, Counters, Gauge, Histogram, Info, Metric

_LOAD_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_MAX_LABELS = 100

FOR_ADAPTER, FOR_REQUEST, REMOVED = "room", "request", "gone"
"""Why an adapter is evicted: another adapter or a request gets its memory; or no request may use it any more."""


class CacheMetrics:
    """Counters of one cache; `exported` lists all of them."""

    def __init__(self) -> None:
        self.hits = Counter("adapter_hits_total", "Admitted requests whose adapter was resident already")
        self.misses = Counter("adapter_misses_total", "Admitted requests whose adapter had to be loaded for them")
        self.loaded = Counter("adapter_loaded_bytes_total", "Bytes of adapters loaded")
        self.host_loads = Counter("adapter_host_loads_total", "Loads to a GPU from the memory of the host")
        self.load_ms = Histogram("adapter_load_ms", "Time of a load", _LOAD_MS)
        self.failed = Counter("adapter_load_failures_total", "Loads that failed")
        self.refused = Counter("adapter_refusals_total", "Registry entries that were refused after a change")
        self.requests = Counters("adapter_requests_total", "Requests by adapter", "adapter", _MAX_LABELS)
        self.evictions = {
            reason: Counter("adapter_evictions_total", "Adapters evicted, by reason", {"why": reason})
            for reason in (FOR_ADAPTER, FOR_REQUEST, REMOVED)
        }

    @property
    def exported(self) -> list[Metric]:
        return [
            *(self.hits, self.misses, self.loaded, self.host_loads, self.load_ms),
            *(self.failed, self.refused, self.requests),
            *self.evictions.values(),
        ]


def state_metrics(
    labels: Callable[[], tuple[list[str], list[str]]],
    slots: int,
    registered: Callable[[], int],
    resident: Callable[[], int],
    vacant_bytes: Callable[[], int],
) -> list[Metric]:
    """Gauges of the current adapters.

    labels: those of the adapters that requests run with, and wait for; slots: of the KV cache; registered: adapters
    that requests may name; resident: adapters in memory; vacant_bytes: of memory reserved for adapters.
    """
    return [
        # A gauge of the model server protocol of the Gateway API's inference extension.
        Info(
            "lora_requests_info",
            "Running and waiting adapters, as labels; the value is the time in seconds",
            lambda: _info_labels(*labels(), slots),
        ),
        Gauge("adapters_known", "Adapters that requests may name", registered),
        Gauge("adapters_resident", "Adapters in memory, ready or loading", resident),
        Gauge("adapter_vacant_bytes", "Free bytes of the memory reserved for adapters", vacant_bytes),
    ]


def scheduler_metrics(scheduler: Any) -> list[Metric]:
    """The metrics of a scheduler's size queues; none for a scheduler without them."""
    if not isinstance(scheduler, SizeQueueStats):
        return []
    stats = scheduler
    metrics: list[Metric] = [
        Counter(
            "adapter_squashes_total",
            "Requests squashed because they delayed a request that they had overtaken",
            read=lambda: stats.squashes,
        ),
        Counter("adapter_bypasses_total", "Requests that overtook a queue's head", read=lambda: stats.bypasses),
    ]
    for queue in range(stats.max_queues):
        labels = {"queue": str(queue)}
        waiting, quota = partial(_read_at, stats.queue_lengths, queue), partial(_read_at, stats.quotas, queue)
        metrics.append(Gauge("adapter_queue_requests", "Waiting requests, by queue", waiting, labels))
        metrics.append(Gauge("adapter_queue_quota_tokens", "Tokens that a queue may hold", quota, labels))
    return metrics


def _info_labels(running: list[str], waiting: list[str], slots: int) -> dict[str, str]:
    return {
        "max_lora": str(slots),
        "running_lora_adapters": _joined(running),
        "waiting_lora_adapters": _joined(waiting),
    }


def _joined(names: Sequence[str]) -> str:
    return ",".join([*names[:_MAX_LABELS], *([OTHER] if len(names) > _MAX_LABELS else [])])


def _read_at(read: Callable[[], Sequence[float]], queue: int) -> float:
    values = read()
    return values[queue] if queue < len(values) else 0.0
