"""The orders of admission by name, and what a config.pbtxt says about them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from shapeshift.adapter_cache.gate import Clock, Gate, Limits, Tokens
from shapeshift.adapter_cache.interfaces import Memory
from shapeshift.adapter_cache.multiqueue import MultiQueue
from shapeshift.adapter_cache.orders import FirstComeFirstServed, ShortestAnswerFirst, SmallestFirst
from shapeshift.settings import require

SCHEDULERS = ("arrival", "chameleon", "fifo", "sjf", "wrs")


@dataclass(frozen=True)
class SchedulingSettings:
    """Which waiting requests get the free slots.

    scheduler           arrival (as they came, loads block nobody), fifo (they block all behind), chameleon (queues by
                        size with quotas), sjf (shortest answer first), wrs (smallest first)
    max_queues          of chameleon: most queues
    recluster_s         of chameleon: seconds between two makings of the queues
    first_token_slo_ms  of chameleon: what quotas aim at; 0: five times the mean time that a request runs
    bypass              of chameleon: whether a request may pass one that waits for memory
    ageing              of sjf: tokens that a second of waiting takes off
    patience            of chameleon, sjf and wrs: a request goes before all others once so many times as many have been
                        admitted since it came as there were before it; 0: never
    """

    scheduler: str = "arrival"
    max_queues: int = 4
    recluster_s: float = 300.0
    first_token_slo_ms: float = 0.0
    bypass: bool = True
    ageing: float = 10.0
    patience: float = 2.0

    def __post_init__(self) -> None:
        require(self.scheduler in SCHEDULERS, "scheduler", self.scheduler, f"one of {', '.join(SCHEDULERS)}")
        require(1 <= self.max_queues <= 64, "max_queues", self.max_queues, "1 to 64")
        require(self.recluster_s > 0, "recluster_s", self.recluster_s, "above 0")
        require(self.first_token_slo_ms >= 0, "first_token_slo_ms", self.first_token_slo_ms, "0 or more")
        require(self.ageing >= 0, "ageing", self.ageing, "0 or more")
        require(self.patience >= 0, "patience", self.patience, "0 or more")


def build(
    own: SchedulingSettings,
    memory: Memory,
    queue_requests: int,
    queue_tokens: int,
    adapter_tokens: Tokens,
    slot_tokens: int = 1,
    clock: Clock = time.monotonic,
) -> Gate[Any]:
    """The order that `own` names. adapter_tokens: see `MultiQueue`; slot_tokens: see `Limits`."""
    limits = Limits(queue_requests, queue_tokens, own.patience, slot_tokens)
    if own.scheduler in ("arrival", "fifo"):
        return FirstComeFirstServed(memory, limits, clock, blocking=own.scheduler == "fifo")
    if own.scheduler == "sjf":
        return ShortestAnswerFirst(memory, limits, own.ageing, clock)
    if own.scheduler == "wrs":
        return SmallestFirst(memory, limits, clock)
    return MultiQueue(
        memory,
        limits,
        adapter_tokens,
        max_queues=own.max_queues,
        recluster_s=own.recluster_s,
        slo_s=own.first_token_slo_ms / 1e3,
        bypass=own.bypass,
        clock=clock,
    )
