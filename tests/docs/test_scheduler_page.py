"""docs/scheduler.md held against the code."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest
from docs_pages import PROJECT, code, prose, table

from shapeshift.cli import scheduler, status
from shapeshift.polymorph.settings import FleetSettings, PolymorphSettings
from shapeshift.scheduler import child, freeze, health, lock, report
from shapeshift.scheduler.settings import SchedulerSettings
from shapeshift.settings import names

PAGE = PROJECT / "docs" / "scheduler.md"


@pytest.mark.parametrize(("heading", "module"), [("Running it by hand", scheduler), ("Looking at it", status)])
def test_options_are_those_of_the_code(heading: str, module: Any) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    module.add_arguments(parser)
    documented = {code(row[0]).split()[0]: code(row[1]) for row in table(PAGE, heading)}
    declared = {action.option_strings[0]: action.default for action in parser._actions}
    assert documented.keys() == declared.keys()
    stated = {name: str(default) for name, default in declared.items() if default not in (None, False)}
    assert {name: documented[name] for name in stated} == stated


def test_files_are_those_of_the_code() -> None:
    documented = {code(row[0]) for row in table(PAGE, "Files")}
    assert documented == {child.LOG, report.FILE, lock.FILE, freeze.FILE}


def test_parameters_are_those_of_the_code() -> None:
    documented = {name for row in table(PAGE, "What it reads") for name in re.findall(r"`([^`]+)`", row[0])}
    assert documented <= names(PolymorphSettings, FleetSettings) | {"profile"}
    used = {"placement", "workers", "worker_pool", "allocation", "bin_edges", "profile"}
    assert used <= documented


def test_numbers_are_those_of_the_code() -> None:
    text = " ".join(prose(PAGE).split())
    rules, own = health.Rules(), SchedulerSettings()
    for said in (
        f"stood still in {rules.still} scrapes in a row",
        f"{rules.ended} scrapes are enough",
        f"stood still in {rules.unseen} scrapes and",
        f"or in {rules.hung} scrapes though",
        f"in {rules.silent} scrapes there was no heartbeat",
        f"every {own.plan_period_s:g} s",
        f"every {own.scale_period_s:g} s",
        f"fewer than {own.least_texts} texts",
        f"better by {100 * own.least_gain:g}%",
        f"at {100 * own.assumed_load:g}% of the greatest load",
        f"after {own.load_timeout_s / 60:g} minutes it counts as failed",
    ):
        assert said in text, said
