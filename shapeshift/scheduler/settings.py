"""How the sidecar works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shapeshift.settings import require


@dataclass(frozen=True)
class SchedulerSettings:
    """What the sidecar watches, how often, and what it takes for a change.

    server, metrics     HOST:PORT of the server's gRPC interface, address of its metrics page
    run_directory       holds key, lock, freeze switch and report
    repositories        folders that hold the worker models; where there are none, the server's own files are loaded
    health_period_s     seconds from one scrape to the next
    plan_period_s       seconds from one plan to the next
    scale_period_s      seconds from one look at the tail latency to the next
    batch               workers changed at once under load; 0: an eighth of the front's, at least one
    start_batch         workers loaded at once where none serves yet
    load_timeout_s      longest time that one load may take
    least_texts         fewer texts in a period than this change no plan
    least_gain          a plan whose mean latency is not better by this share changes nothing
    assumed_load        share of the workers' time that the first plan takes as asked for, before any traffic
    dry_run             decide and say, do nothing
    Raises InvalidInputError naming the field.
    """

    server: str = "127.0.0.1:8001"
    metrics: str = "http://127.0.0.1:8002/metrics"
    run_directory: Path = Path("build/run")
    repositories: tuple[Path, ...] = (Path("build/repository"),)
    health_period_s: float = 1.0
    plan_period_s: float = 120.0
    scale_period_s: float = 10.0
    batch: int = 0
    start_batch: int = 4
    load_timeout_s: float = 300.0
    least_texts: int = 50
    least_gain: float = 0.01
    assumed_load: float = 0.7
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("health_period_s", "plan_period_s", "scale_period_s", "load_timeout_s"):
            value = getattr(self, name)
            require(0.05 <= value <= 86_400, name, value, "0.05 to 86400 seconds")
        require(0 <= self.batch <= 1000, "batch", self.batch, "0 to 1000")
        require(1 <= self.start_batch <= 1000, "start_batch", self.start_batch, "1 to 1000")
        require(self.least_texts >= 1, "least_texts", self.least_texts, "at least 1")
        require(0 <= self.least_gain < 1, "least_gain", self.least_gain, "at least 0 and below 1")
        require(0 < self.assumed_load < 1, "assumed_load", self.assumed_load, "above 0 and below 1")

    def batch_of(self, workers: int) -> int:
        """How many of so many workers are changed at once under load."""
        return self.batch or max(workers // 8, 1)
