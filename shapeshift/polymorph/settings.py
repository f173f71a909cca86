"""What a config.pbtxt says about serving a polymorph model."""

from __future__ import annotations

import json
from dataclasses import dataclass

from shapeshift.errors import InvalidInputError
from shapeshift.polymorph import allocate, dispatch
from shapeshift.settings import require

PLACEMENTS = ("inline", "resident", "partitioned", "auto")
DISPATCHES = (*dispatch.ALGORITHMS, "bin_packing")
CURVES = ("md1", "clamped")
MOST_WORKERS = 256


@dataclass(frozen=True)
class PolymorphSettings:
    """Parameters of the serving processes and of the plan that the scheduler makes for them.

    placement       inline: the front's own process holds the engines; resident: workers hold all of them;
                    partitioned: each worker holds one; auto: chosen by `make engines`, which states why
    engine_threads  inline: threads that run engines, one core each; 0: one a core
    queue_rows      most texts that may wait; a request that does not fit is answered UNAVAILABLE
    queue_tokens    most tokens that may wait
    pack_tokens     most tokens that several texts share in one engine call; 0: from the profile
    slo_ms          latency objective; half of it and 95% of it become bounds of the latency histogram; 0: none
    memory_mb       while the process takes more than this, no further static engine is loaded
    workers         workers at first; 0: one a GPU, else two
    min_workers     fewest workers that the scheduler leaves; 0: `workers`, or 1 in a pool
    max_workers     most workers; 0: `workers`
    worker_pool     name of a pool of workers that several fronts share; empty: none
    pool_workers    workers of that pool, the same in each of its fronts
    dispatch        how the front chooses a worker: one of DISPATCHES
    threshold       multilevel: a level that is fuller than this passes a text on
    decay           multilevel: factor on the threshold with each level
    peek            levels that are looked at
    allocation      how workers are divided among the bins: one of `allocate.ALGORITHMS`
    curve           latency curve of the allocation: md1, or clamped as in the paper
    cap_last        whether the longest bin, too, must have the capacity that it needs
    drain           what waits for a bin's workers counts as demand, so as to be served this often within a period;
                    0: it does not count, as in the paper
    """

    placement: str = "inline"
    engine_threads: int = 0
    queue_rows: int = 1024
    queue_tokens: int = 131072
    pack_tokens: int = 0
    slo_ms: float = 0.0
    memory_mb: int = 4096
    workers: int = 0
    min_workers: int = 0
    max_workers: int = 0
    worker_pool: str = ""
    pool_workers: int = 0
    dispatch: str = "earliest_finish"
    threshold: float = 0.85
    decay: float = 0.9
    peek: int = 6
    allocation: str = "exact"
    curve: str = "md1"
    cap_last: bool = True
    drain: float = 2.0

    def __post_init__(self) -> None:
        for field, known in (
            ("placement", PLACEMENTS),
            ("dispatch", DISPATCHES),
            ("allocation", tuple(allocate.ALGORITHMS)),
            ("curve", CURVES),
        ):
            value = getattr(self, field)
            require(value in known, field, value, f"one of {', '.join(known)}")
        require(0 <= self.engine_threads <= 256, "engine_threads", self.engine_threads, "0 to 256")
        require(self.queue_rows >= 1, "queue_rows", self.queue_rows, "at least 1")
        require(self.queue_tokens >= 1, "queue_tokens", self.queue_tokens, "at least 1")
        require(self.pack_tokens >= 0, "pack_tokens", self.pack_tokens, "0 or more")
        require(self.slo_ms >= 0, "slo_ms", self.slo_ms, "0 or more")
        require(self.memory_mb >= 1, "memory_mb", self.memory_mb, "at least 1")
        require(self.threshold >= 0, "threshold", self.threshold, "at least 0")
        require(self.decay >= 0, "decay", self.decay, "at least 0")
        require(self.peek >= 1, "peek", self.peek, "at least 1")
        require(self.drain >= 0, "drain", self.drain, "at least 0")
        self._check_workers()

    def _check_workers(self) -> None:
        require(0 <= self.workers <= MOST_WORKERS, "workers", self.workers, f"0 to {MOST_WORKERS}")
        require(self.max_workers <= MOST_WORKERS, "max_workers", self.max_workers, f"at most {MOST_WORKERS}")
        most = self.max_workers or self.workers or MOST_WORKERS
        require(0 <= self.min_workers <= most, "min_workers", self.min_workers, f"0 to {most}, the most workers")
        at_least = f"0, or at least workers ({self.workers})"
        require(self.max_workers == 0 or self.max_workers >= self.workers, "max_workers", self.max_workers, at_least)
        pooled = self.pool_workers >= 1 if self.worker_pool else self.pool_workers == 0
        require(pooled, "pool_workers", self.pool_workers, "at least 1 with a worker_pool, 0 without one")
        objective = "above 0 with placement partitioned: the division of the workers rests on it"
        require(self.placement != "partitioned" or self.slo_ms > 0, "slo_ms", self.slo_ms, objective)


@dataclass(frozen=True)
class FleetSettings:
    """Parameters that `make engines` adds to a front, and the scheduler when it loads one anew.

    bin_edges         JSON [tokens, ...]: the longest texts of the bins that workers may hold, ascending
    plan_histogram    JSON [weight, ...]: the share of texts in each bin, before any traffic was seen
    placement_reason  why `auto` became what it is
    generation        counts the loads that replaced a dead process
    """

    bin_edges: str = "[]"
    plan_histogram: str = "[]"
    placement_reason: str = ""
    generation: int = 0

    def edges(self) -> list[int]:
        """The bin edges; InvalidInputError unless they ascend strictly from at least 1."""
        try:
            edges = json.loads(self.bin_edges)
            usable = all(isinstance(edge, int) for edge in edges) and all(
                low < high for low, high in zip([0, *edges], edges, strict=False)
            )
        except (ValueError, TypeError):
            usable = False
        if not usable:
            raise InvalidInputError("bin_edges", self.bin_edges, "a JSON list of whole numbers, ascending")
        return [int(edge) for edge in edges]


@dataclass(frozen=True)
class WorkerSettings:
    """Parameters of a worker model, `<front>_wNN`.

    worker_of   the front that it serves
    bin         longest text that it takes, in tokens; 0: any, all engines are loaded
    generation  counts the loads that replaced a dead process
    """

    worker_of: str = ""
    bin: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        require(self.bin >= 0, "bin", self.bin, "0 or more")


def worker_name(front: str, number: int) -> str:
    """The model name of a front's worker."""
    return f"{front}_w{number:02d}"
