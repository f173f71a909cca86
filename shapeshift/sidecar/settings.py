"""Settings of the sidecar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shapeshift.settings import require


@dataclass(frozen=True)
class SidecarSettings:
    """What the sidecar may change, and how often it plans.

    run_directory  folder of the key, the lock, the freeze switch and the report
    repositories   folders with the worker models; a model that is in none is loaded from the server's own files
    plan_period_s  seconds between two plans
    dry_run        log decisions, change nothing
    Raises InvalidInputError with the name of the field.
    """

    run_directory: Path = Path("build/run")
    repositories: tuple[Path, ...] = (Path("build/repository"),)
    plan_period_s: float = 120.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        value = self.plan_period_s
        require(0.05 <= value <= 86_400, "plan_period_s", value, "must be 0.05 to 86400 seconds")
