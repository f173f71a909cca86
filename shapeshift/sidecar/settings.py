"""Settings of the sidecar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shapeshift.settings import require


@dataclass(frozen=True)
class SidecarSettings:
    """What the sidecar watches, how often it acts, and when a change is worth making.

    server, metrics      HOST:PORT of the server's gRPC interface, address of its metrics page
    fleet                name of the fleet; empty for a single server
    run_directory        folder of the key, the lock, the freeze switch and the report
    repositories         folders with the worker models; a model that is in none is loaded from the server's own files
    health_period_s      seconds between two scrapes
    plan_period_s        seconds between two plans
    scale_period_s       seconds between two checks of the tail latency
    batch                workers changed at once under load; 0: an eighth of the front's workers, at least one
    start_batch          workers loaded at once for each node while none of the front's workers serves
    node_limit_s         a node of a fleet that takes longer than this to answer is late, and left out
    load_timeout_s       longest time that one load may take
    min_texts            a period with fewer texts than this changes no plan
    min_gain             a new plan must improve the mean latency by at least this share
    assumed_utilization  share of the workers' capacity that the first plan assumes to be in use, before any traffic
    dry_run              log decisions, change nothing
    Raises InvalidInputError with the name of the field.
    """

    server: str = "127.0.0.1:8001"
    metrics: str = "http://127.0.0.1:8002/metrics"
    fleet: str = ""
    run_directory: Path = Path("build/run")
    repositories: tuple[Path, ...] = (Path("build/repository"),)
    health_period_s: float = 1.0
    plan_period_s: float = 120.0
    scale_period_s: float = 10.0
    batch: int = 0
    start_batch: int = 4
    node_limit_s: float = 0.8
    load_timeout_s: float = 900.0
    min_texts: int = 50
    min_gain: float = 0.01
    assumed_utilization: float = 0.7
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("health_period_s", "plan_period_s", "scale_period_s", "node_limit_s", "load_timeout_s"):
            value = getattr(self, name)
            require(0.05 <= value <= 86_400, name, value, "must be 0.05 to 86400 seconds")
        require(0 <= self.batch <= 1000, "batch", self.batch, "must be 0 to 1000")
        require(1 <= self.start_batch <= 1000, "start_batch", self.start_batch, "must be 1 to 1000")
        require(self.min_texts >= 1, "min_texts", self.min_texts, "must be at least 1")
        require(0 <= self.min_gain < 1, "min_gain", self.min_gain, "must be at least 0 and below 1")
        value = self.assumed_utilization
        require(0 < value < 1, "assumed_utilization", value, "must be above 0 and below 1")

    def batch_size(self, workers: int) -> int:
        """How many of a front's `workers` are changed at once under load."""
        return self.batch or max(workers // 8, 1)

    def start_size(self, nodes: int) -> int:
        """How many workers of a front on so many nodes are loaded at once while none of them serves."""
        return self.start_batch * max(nodes, 1)
