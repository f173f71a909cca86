"""What the loop over adapters shows of itself: who runs and waits, what lies in the pool, the scheduler's queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any

from shapeshift.adapter_cache.cache import AdapterCache
from shapeshift.adapter_cache.gate import Gate
from shapeshift.adapter_cache.meters import MOST_LABELS
from shapeshift.adapter_cache.multiqueue import MultiQueue
from shapeshift.serving.metrics import OTHER, Counter, Gauge, Info, Metric

Names = Callable[[], tuple[list[str], list[str]]]


class LoopReport:
    """`exported` lists its metrics. names: labels of the adapters that run, and of those that are waited for."""

    def __init__(self, cache: AdapterCache, gate: Gate[Any], names: Names, slots: int, known: Sized) -> None:
        self.exported: list[Metric] = [
            # The Gateway API's model servers have a gauge of such labels.
            Info(
                "lora_requests_info",
                "Adapters that run and that are waited for, as labels; the time in seconds",
                lambda: _labels(names(), slots),
            ),
            Gauge("adapters_known", "Adapters that may be asked for", lambda: len(known)),
            Gauge("adapters_resident", "Adapters in the pool, ready or being loaded", lambda: len(cache.residents())),
            Gauge(
                "adapter_vacant_bytes",
                "Bytes that adapters could have without another going",
                lambda: cache.vacant_bytes,
            ),
        ]
        if isinstance(gate, MultiQueue):
            self.exported += _queues(gate)


def _labels(names: tuple[list[str], list[str]], slots: int) -> dict[str, str]:
    running, waiting = names
    return {
        "max_lora": str(slots),
        "running_lora_adapters": _capped(running),
        "waiting_lora_adapters": _capped(waiting),
    }


def _capped(names: Sequence[str]) -> str:
    return ",".join([*names[:MOST_LABELS], *([OTHER] if len(names) > MOST_LABELS else [])])


def _queues(gate: MultiQueue[Any]) -> list[Metric]:
    made: list[Metric] = [
        Counter(
            "adapter_squashes_total", "Requests set aside for a head that they had passed", read=lambda: gate.squashes
        ),
        Counter("adapter_bypasses_total", "Requests that passed a head", read=lambda: gate.bypasses),
    ]
    for queue in range(gate.most_queues):
        labels = {"queue": str(queue)}
        waiting, quota = partial(_at, gate.queue_lengths, queue), partial(_at, gate.quotas, queue)
        made.append(Gauge("adapter_queue_requests", "Requests that wait, by queue", waiting, labels))
        made.append(Gauge("adapter_queue_quota_tokens", "Tokens that a queue may hold", quota, labels))
    return made


def _at(read: Callable[[], Sequence[float]], queue: int) -> float:
    values = read()
    return values[queue] if queue < len(values) else 0.0
