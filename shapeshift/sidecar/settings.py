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
    check_seconds  least time between two questions whose answer is known, to models that are idle; 0: none
    check_share    most of the time that may go to these questions
    watch_all      reload every Python model of the server, not only those of this project
    hang_seconds   of such a model: none of its waiting requests ends for so long; 0: not looked at
    spared         models that `watch_all` leaves alone
    most_reloads   after so many reloads in a row it is left alone, too
    Raises InvalidInputError with the name of the field.
    """

    run_directory: Path = Path("build/run")
    repositories: tuple[Path, ...] = (Path("build/repository"),)
    plan_period_s: float = 120.0
    dry_run: bool = False
    check_seconds: float = 60.0
    check_share: float = 0.001
    watch_all: bool = False
    hang_seconds: float = 0.0
    spared: tuple[str, ...] = ()
    most_reloads: int = 10

    def __post_init__(self) -> None:
        value = self.plan_period_s
        require(0.05 <= value <= 86_400, "plan_period_s", value, "must be 0.05 to 86400 seconds")
        value = self.check_seconds
        require(value == 0 or 0.05 <= value <= 86_400, "check_seconds", value, "must be 0 or 0.05 to 86400 seconds")
        require(0 < self.check_share <= 1, "check_share", self.check_share, "above 0, at most 1")
        require(0 <= self.hang_seconds <= 86_400, "hang_seconds", self.hang_seconds, "must be 0 to 86400 seconds")
        require(self.most_reloads >= 1, "most_reloads", self.most_reloads, "must be at least 1")
