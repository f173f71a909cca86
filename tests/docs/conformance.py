"""Executes every artefact that the pages print, and writes what came of it into docs/conformance.md.

`make conformance` runs it. Each part is a set of tests, the long ones among them, run against the artefact itself. One
that needs a program that is not here says so. No part begins after an hour; the row of a part that is not run stays,
and says so where it has never been run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from shapeshift.engines import hardware

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "conformance.md"
HEAD = "| artefact | date | tests that ran | left out | measured |"
MACHINE = "Last run on: "
LIMIT_S = 3600.0
PARTS: Mapping[str, Sequence[str]] = {
    "image for CPUs": ("docs/test_image.py",),
    "compose.cpu.yaml, each container restarted under load": ("docs/test_compose.py",),
    "manifests in podman, on docker/Dockerfile": ("docs/test_manifests.py", "fleet/test_fleet_manifests.py"),
    "files for KServe and the Gateway API": ("docs/test_kubernetes.py",),
    "upgrade and rollback": ("fleet/test_upgrade.py", "fleet/test_ray_fleet.py"),
    "certificates near their end": ("fleet/test_fleet_certificates.py", "fleet/test_fleet_nodes_server.py"),
    "a full disk": ("fused_decode/test_decode_shared_weights.py", "build_engines/test_build_hub.py"),
    "real chat templates": ("gateway/test_gateway_real_templates.py", "gateway/test_gateway_answer_templates.py"),
    "llm-comply": ("gateway/test_gateway_suites.py",),
    "clients and suites of others on a server": ("gateway/test_gateway_clients.py",),
    "rules, by promtool": ("docs/test_dashboards.py",),
    "dashboards, by Prometheus": ("docs/test_dashboards_server.py",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write their rows. Returns 1 where a test has failed."""
    parser = argparse.ArgumentParser(description="Execute what the pages print, and write docs/conformance.md.")
    parser.add_argument("--only", metavar="TEXT", default="", help="the parts whose names contain the text")
    options = parser.parse_args(arguments)
    began, rows = time.monotonic(), rows_of(PAGE.read_text())
    failures = 0
    for part, files in PARTS.items():
        if options.only in part and time.monotonic() - began < LIMIT_S:
            rows[part], failed = run(part, [f"tests/{file}" for file in files])
            failures += failed
            PAGE.write_text(with_rows(PAGE.read_text(), rows))
    return min(failures, 1)


def run(part: str, files: Sequence[str]) -> tuple[str, int]:
    """Run the tests of a part. Returns its row, and how many have failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "long or not long", "-o", "junit_family=xunit1", f"--junitxml={report}", *files]
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=PROJECT, check=False)
        return row_of(part, ElementTree.parse(report).getroot())


def row_of(part: str, report: ElementTree.Element) -> tuple[str, int]:
    """The row of a part by pytest's report, and how many tests have failed."""
    cases = list(report.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = {skip.get("message", "") for case in cases for skip in case.findall("skipped")}
    skipped = sum(case.find("skipped") is not None for case in cases)
    ran = f"{len(cases) - skipped}" + (f", **{len(failed)} failed**" if failed else "")
    left_out = f"{skipped}: {'; '.join(sorted(reasons))}" if skipped else ""
    facts = [f"{one.get('name')}: {one.get('value')}" for one in report.iter("property")]
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    return f"| {part} | {today} | {ran} | {left_out} | {', '.join(facts)} |", len(failed)


def machine() -> str:
    """The processor, and how busy it is."""
    name = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return f"{hardware.cores()} cores of {name.partition(': ')[2]}, load average {os.getloadavg()[1]:.0f}."


def rows_of(page: str) -> dict[str, str]:
    """The rows of the page's table, by part."""
    lines = page.partition(f"{HEAD}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return {cell[1]: line for line in lines if (cell := re.match(r"\| (.+?) \|", line))}


def with_rows(page: str, rows: Mapping[str, str]) -> str:
    """The page with these rows, in the order of the parts."""
    before, _, rest = page.partition(f"{HEAD}\n")
    before = re.sub(f"{MACHINE}.*", MACHINE + machine(), before)
    after = rest.partition("\n\n")[2]
    table = [HEAD, "|---|---|---|---|---|", *(rows.get(part, f"| {part} | not run |  |  |  |") for part in PARTS)]
    return before + "\n".join(table) + "\n\n" + after


if __name__ == "__main__":
    sys.exit(main())
