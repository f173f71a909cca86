"""What a config.pbtxt says about serving a polymorph model."""

from __future__ import annotations

from dataclasses import dataclass

from shapeshift.settings import require

PLACEMENTS = ("inline",)


@dataclass(frozen=True)
class PolymorphSettings:
    """Parameters of the serving process.

    placement       inline: the front's own process holds the engines
    engine_threads  threads that run engines, one core each; 0: one a core
    queue_rows      most texts that may wait; a request that does not fit is answered UNAVAILABLE
    queue_tokens    most tokens that may wait
    pack_tokens     most tokens that several texts share in one engine call; 0: from the profile
    slo_ms          latency objective; half of it and 95% of it become bounds of the latency histogram; 0: none
    memory_mb       while the process takes more than this, no further static engine is loaded
    """

    placement: str = "inline"
    engine_threads: int = 0
    queue_rows: int = 1024
    queue_tokens: int = 131072
    pack_tokens: int = 0
    slo_ms: float = 0.0
    memory_mb: int = 4096

    def __post_init__(self) -> None:
        require(self.placement in PLACEMENTS, "placement", self.placement, f"one of {', '.join(PLACEMENTS)}")
        require(0 <= self.engine_threads <= 256, "engine_threads", self.engine_threads, "0 to 256")
        require(self.queue_rows >= 1, "queue_rows", self.queue_rows, "at least 1")
        require(self.queue_tokens >= 1, "queue_tokens", self.queue_tokens, "at least 1")
        require(self.pack_tokens >= 0, "pack_tokens", self.pack_tokens, "0 or more")
        require(self.slo_ms >= 0, "slo_ms", self.slo_ms, "0 or more")
        require(self.memory_mb >= 1, "memory_mb", self.memory_mb, "at least 1")
