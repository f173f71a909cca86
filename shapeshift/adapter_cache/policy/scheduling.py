"""The schedulers by name, and their settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shapeshift.adapter_cache.interfaces import AdapterMemory
from shapeshift.fused_decode.policy.admission import OTHERS, Admission
from shapeshift.settings import Choices, require


@dataclass(frozen=True)
class SchedulingSettings:
    """Which waiting requests get the free slots.

    scheduler           arrival (in order of arrival, a load blocks no other request), fifo (a load blocks all requests
                        behind it), chameleon (size queues with quotas), sjf (shortest answer first), wrs (smallest
                        weighted request size first)
    max_queues          of chameleon: maximum number of queues
    recluster_s         of chameleon: seconds between two rebuilds of the queues
    first_token_slo_ms  of chameleon: the latency objective of the quotas; 0: five times the mean run time of a request
    bypass              of chameleon: whether a request may overtake one that waits for memory
    ageing              of sjf: predicted tokens that one second of waiting subtracts
    patience            of chameleon, sjf and wrs: a request goes first once `patience` times as many requests have
                        been admitted since its arrival as were waiting or running then; 0: never
    """

    scheduler: str = "arrival"
    max_queues: int = 4
    recluster_s: float = 300.0
    first_token_slo_ms: float = 0.0
    bypass: bool = True
    ageing: float = 10.0
    patience: float = 2.0

    def __post_init__(self) -> None:
        SCHEDULERS.require(self.scheduler)
        require(1 <= self.max_queues <= 64, "max_queues", self.max_queues, "1 to 64")
        require(self.recluster_s > 0, "recluster_s", self.recluster_s, "above 0")
        require(self.first_token_slo_ms >= 0, "first_token_slo_ms", self.first_token_slo_ms, "0 or more")
        require(self.ageing >= 0, "ageing", self.ageing, "0 or more")
        require(self.patience >= 0, "patience", self.patience, "0 or more")


@dataclass(frozen=True)
class SchedulerInputs:
    """What every scheduler is built from.

    queue_requests, queue_tokens  most requests that may wait, and most tokens that these may come to
    adapter_tokens  memory of an adapter's weights, in tokens of KV cache; 0 for None
    block_tokens    tokens of a block of KV cache; a request takes whole blocks
    classes, overtaken_requests  of arrival and fifo: see `ClassOrder`
    """

    settings: SchedulingSettings
    memory: AdapterMemory
    queue_requests: int
    queue_tokens: int
    adapter_tokens: Callable[[str | None], int]
    block_tokens: int = 1
    clock: Callable[[], float] = time.monotonic
    classes: Sequence[str] = (OTHERS,)
    overtaken_requests: int = 0


_POLICY = "shapeshift.adapter_cache.policy"
SCHEDULERS: Choices[Callable[[SchedulerInputs], Admission[Any]]] = Choices(
    "scheduler",
    {
        "arrival": f"{_POLICY}.admission:ArrivalOrder",
        "chameleon": f"{_POLICY}.multiqueue:MultiQueue",
        "fifo": f"{_POLICY}.admission:BlockingArrivalOrder",
        "sjf": f"{_POLICY}.baselines.sorted_orders:ShortestAnswerFirst",
        "wrs": f"{_POLICY}.baselines.sorted_orders:SmallestRequestFirst",
    },
)


def make_scheduler(inputs: SchedulerInputs) -> Admission[Any]:
    """The scheduler that `inputs.settings` names."""
    return SCHEDULERS[inputs.settings.scheduler](inputs)
