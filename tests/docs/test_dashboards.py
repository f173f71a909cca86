"""Dashboards, alert rules and the configuration of Prometheus, held against the metrics of the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from docker.observability import dashboards
from shapeshift.fleet.metrics_proxy import CERTIFICATE_EXPIRY
from shapeshift.gateway.http.meter import GatewayMetrics
from tests.docs.docs_pages import PROJECT, TECHNIQUES
from tests.docs.docs_sources import declared_metrics, exported_names
from tests.sampling import few

FOLDER = PROJECT / "docker" / "observability"
RULES = FOLDER / "rules.yml"
TESTS = FOLDER / "rules_test.yml"
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool is installed (Debian: apt-get install prometheus)"
)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels(name: str) -> list[dict[str, Any]]:
    """The panels of a dashboard's file that draw something."""
    made = json.loads((dashboards.FOLDER / f"{name}.json").read_text())
    return [panel for panel in made["panels"] if panel["type"] != "row"]


def promtool(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", dashboards.BOARDS)
def test_files_are_what_the_script_makes(name: str) -> None:
    assert (dashboards.FOLDER / f"{name}.json").read_text() == dashboards.built(name), (
        "run `python -m docker.observability.dashboards`"
    )


def test_there_is_a_dashboard_for_each_technique_and_one_of_all() -> None:
    assert {file.stem for file in dashboards.FOLDER.iterdir()} == dashboards.BOARDS.keys() == {"overview", *TECHNIQUES}


def test_each_metric_is_drawn_and_each_drawn_metric_exists() -> None:
    drawn = " ".join(
        target["expr"] for name in dashboards.BOARDS for panel in panels(name) for target in panel["targets"]
    )
    named = set(re.findall(r"\bshapeshift_\w+", drawn))
    exported = {name for name in named if not name.startswith("shapeshift_gateway_")}
    assert exported <= exported_names()
    assert {*declared_metrics(), CERTIFICATE_EXPIRY} == {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    families = re.findall(r"^# TYPE (\S+)", GatewayMetrics().page(), re.MULTILINE)
    assert {*families} == {re.sub(r"_bucket$", "", name) for name in named - exported}


@pytest.mark.parametrize("name", dashboards.BOARDS)
def test_panels_are_told_apart_and_do_not_overlap(name: str) -> None:
    made = json.loads((dashboards.FOLDER / f"{name}.json").read_text())["panels"]
    assert len({panel["id"] for panel in made}) == len(made)
    cells = [
        (x, y)
        for panel in made
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_rules_name_metrics_that_exist() -> None:
    for rule in rules():
        named = set(re.findall(r"\bshapeshift_\w+", rule["expr"]))
        assert {name for name in named if not name.startswith("shapeshift_gateway_")} <= exported_names(), rule["alert"]


def test_each_rule_is_seen_firing_and_silent() -> None:
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


@needs_promtool
def test_the_configuration_and_the_rules_are_valid() -> None:
    done = promtool("check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


@needs_promtool
def test_rules_fire_when_they_should() -> None:
    done = promtool("test", "rules", "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    "name", few(sorted({rule["alert"] for rule in rules() if "heartbeat" in rule["expr"]}), ("ModelDead",))
)
def test_a_rule_that_heeds_dead_processes_is_noticed(name: str, tmp_path: Path) -> None:
    """A gauge without the heartbeat beside it; the heartbeat of each process instead of a model's."""
    text = RULES.read_text()
    for rule in rules():
        if rule["alert"] == name:
            before, found, behind = text.partition(f"- alert: {name}\n")
            behind = re.sub(r"\s+and on \(instance, model, pid\) rate\([^)]*\) > 0", "", behind, count=1)
            behind = behind.replace("max by (instance, model) (rate(", "(rate(", 1) if name == "ModelDead" else behind
            text = before + found + behind
    assert text != RULES.read_text()
    (tmp_path / "rules.yml").write_text(text)
    shutil.copyfile(TESTS, tmp_path / "rules_test.yml")
    assert promtool("check", "rules", "rules.yml", folder=tmp_path).returncode == 0
    done = promtool("test", "rules", "rules_test.yml", folder=tmp_path)
    assert done.returncode == 1 and name in done.stdout + done.stderr
