"""Settings of the sidecar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shapeshift.settings import require


@dataclass(frozen=True)
class SidecarSettings:
    """What the sidecar watches, and how often it acts.

    server, metrics   HOST:PORT of the server's gRPC interface, address of its metrics page
    fleet             name of the fleet; empty for a single server
    run_directory     folder of the key, the lock, the freeze switch and the report
    repositories      folders with the worker models; a model that is in none is loaded from the server's own files
    health_period_s   seconds between two scrapes
    plan_period_s     seconds between two plans
    dry_run           log decisions, change nothing
    Raises InvalidInputError with the name of the field.
    """

    server: str = "127.0.0.1:8001"
    metrics: str = "http://127.0.0.1:8002/metrics"
    fleet: str = ""
    run_directory: Path = Path("build/run")
    repositories: tuple[Path, ...] = (Path("build/repository"),)
    health_period_s: float = 1.0
    plan_period_s: float = 120.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("health_period_s", "plan_period_s"):
            value = getattr(self, name)
            require(0.05 <= value <= 86_400, name, value, "must be 0.05 to 86400 seconds")
