"""docs/sidecar.md held against the code."""

from __future__ import annotations

from shapeshift.cli import sidecar
from shapeshift.sidecar import actuate, health, run_files
from shapeshift.sidecar.policy import decide, plan
from shapeshift.sidecar.settings import SidecarSettings
from tests.docs.docs_pages import PROJECT, code, prose, table

PAGE = PROJECT / "docs" / "sidecar.md"


def test_files_are_those_of_the_code() -> None:
    documented = {code(row[0]) for row in table(PAGE, "Files")}
    assert documented == {
        sidecar.LOG_FILE,
        run_files.REPORT_FILE,
        run_files.LOCK_FILE,
        run_files.FREEZE_FILE,
        run_files.OWED_FILE,
    }


def test_numbers_are_those_of_the_code() -> None:
    text = " ".join(prose(PAGE).split())
    limits, own = health.HealthLimits(), SidecarSettings()
    for statement in (
        f"stood still in {limits.absent} scrapes in a row",
        f"{limits.ended} scrapes are enough",
        f"stood still in {limits.unknown} scrapes and",
        f"or in {limits.hung} scrapes although",
        f"in {limits.silent} scrapes there was no heartbeat",
        f"every {own.plan_period_s:g} s",
        f"every {decide.SCALE_PERIOD_S:g} s",
        f"fewer than {decide.MIN_TEXTS} texts",
        f"better by {100 * plan.MIN_GAIN:g}%",
        f"at {100 * plan.ASSUMED_UTILIZATION:g}% of the greatest load",
        f"after {actuate.LOAD_TIMEOUT_S / 60:g} minutes it counts as failed",
    ):
        assert statement in text, statement
