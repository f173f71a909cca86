"""Adding or releasing a worker: target tracking on the tail latency (Arlo, section 4, resource scaling)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Targets:
    """When to scale. The defaults are the paper's.

    out_share: a worker is added when the p98 latency reaches this share of the SLO; in_share, in_after_s: a worker is
    released when it was below this share for so many seconds. Raises ValueError naming the field.
    """

    out_share: float = 0.95
    in_share: float = 0.5
    in_after_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.in_share < self.out_share:
            raise ValueError(f"in_share: got {self.in_share}; at least 0 and below out_share ({self.out_share})")
        if self.in_after_s < 0:
            raise ValueError(f"in_after_s: got {self.in_after_s}; at least 0")


PAPER = Targets()


@dataclass(frozen=True)
class Decision:
    """action: out, in or keep; worker: the one to release, for `in` only."""

    action: Literal["out", "in", "keep"]
    worker: int | None = None


def decide(
    p98_ms: float,
    slo_ms: float,
    below_since_s: float,
    outstanding: Sequence[int],
    min_workers: int,
    max_workers: int,
    targets: Targets = PAPER,
) -> Decision:
    """Whether to add a worker (it gets the longest bin), release one, or neither.

    p98_ms: of recently answered requests; below_since_s: how long it has been below in_share of the SLO;
    outstanding: requests of each worker. The worker with the fewest is released, the first of several. The bounds
    take precedence over the latency.
    Raises ValueError if min_workers exceeds max_workers.
    """
    workers = len(outstanding)
    if min_workers > max_workers:
        raise ValueError(f"min_workers: got {min_workers}; at most max_workers ({max_workers})")
    if workers < min_workers:
        return Decision("out")
    if workers > max_workers:
        return _release(outstanding)
    if p98_ms >= targets.out_share * slo_ms:
        return Decision("out") if workers < max_workers else Decision("keep")
    idle = p98_ms < targets.in_share * slo_ms and below_since_s >= targets.in_after_s
    return _release(outstanding) if idle and workers > min_workers else Decision("keep")


def _release(outstanding: Sequence[int]) -> Decision:
    return Decision("in", min(range(len(outstanding)), key=outstanding.__getitem__))
