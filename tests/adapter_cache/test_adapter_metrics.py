"""The metrics of size queues, and the labels of running and waiting adapters."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from shapeshift.adapter_cache import metrics
from shapeshift.serving.metrics import OTHER, Gauge, Info


@dataclass
class Queues:
    """A scheduler whose second queue is in use."""

    max_queues: int = 3
    squashes: int = 5
    bypasses: int = 7
    lengths: list[int] = field(default_factory=lambda: [0, 4])

    def queue_lengths(self) -> list[int]:
        return self.lengths

    def quotas(self) -> list[int]:
        return [100, 200]


def test_every_queue_has_its_gauges_also_while_there_are_fewer() -> None:
    found = {
        (one.name, one.labels["queue"]): one.read()
        for one in metrics.scheduler_metrics(Queues())
        if isinstance(one, Gauge)
    }
    waiting, quota = "shapeshift_adapter_queue_requests", "shapeshift_adapter_queue_quota_tokens"
    assert found == {
        (waiting, "0"): 0,
        (waiting, "1"): 4,
        (waiting, "2"): 0.0,
        (quota, "0"): 100,
        (quota, "1"): 200,
        (quota, "2"): 0.0,
    }
    assert metrics.scheduler_metrics(object()) == []


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (100, 100), (101, 100)])
def test_a_hundred_adapters_are_named_and_then_others(count: int, shown: int) -> None:
    names = [f"a{number}" for number in range(count)]
    made = metrics.state_metrics(lambda: (names, ["b"]), 8, lambda: 1, lambda: 1, lambda: 0)
    labels = next(one for one in made if isinstance(one, Info)).read()
    rest = [OTHER] if count > shown else []
    assert labels == {
        "max_lora": "8",
        "running_lora_adapters": ",".join([*names[:shown], *rest]),
        "waiting_lora_adapters": "b",
    }
