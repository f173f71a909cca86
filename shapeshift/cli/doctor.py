"""`shapeshift doctor`: what this machine and this installation can do, and why not."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from shapeshift.cli.checks import machine, software
from shapeshift.cli.checks.finding import MISSING


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift doctor`."""
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument("--triton", type=Path, metavar="DIR", help="the server of `serve --triton`")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Write one line for each finding; returns 1 if something is missing that serving needs."""
    findings = [*machine.check(options.build), *software.check(options.build, options.triton)]
    usable = all(one.state != MISSING for one in findings)
    if options.json:
        shown = {"usable": usable, "findings": [asdict(one) for one in findings]}
        sys.stdout.write(json.dumps(shown) + "\n")
        return int(not usable)
    width = max(len(one.name) for one in findings)
    sys.stdout.write("".join(f"{one.state:8}{one.name:{width}}  {one.text}\n" for one in findings))
    return int(not usable)
