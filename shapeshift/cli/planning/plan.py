"""`shapeshift plan`: the cheapest workers that hold an objective for a load."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from shapeshift.cli.planning.record import record, require_writable, write
from shapeshift.progress import Progress, warn
from shapeshift.simulate import plan
from shapeshift.simulate.plan import Answer, Search
from shapeshift.table import table
from shapeshift.workloads.load import CSV, Load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift plan`."""
    parser.add_argument(
        "case", type=Path, metavar="PLAN.toml", help="load, objective, and kinds of workers with prices"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="plan for this CSV file instead of [load]")
    parser.add_argument("--from-server", metavar="MODEL", help="record this front first; --trace says where to")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long it is recorded (%(default)s)")
    parser.add_argument("--build", type=Path, default=Path("build"), help="the server's build folder (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the answer. Raises ShapeshiftError."""
    file = options.trace
    if options.from_server:
        file = file or options.build / "run" / f"{options.from_server}.trace.csv"
        require_writable(file)
        trace, lost = record(options.build, options.from_server, options.seconds)
        write(trace, file)
        if lost:
            warn(f"{lost} records were overwritten before they were read: the load was higher than the trace")
    load = Load(CSV, trace=str(file), duration_s=math.inf) if file else None
    case, requests = plan.read(options.case, load)
    progress = Progress("plan")
    answer = Search(case, requests, progress).answer()
    progress.done()
    sys.stdout.write((json.dumps(plan.as_json(answer)) if options.json else as_text(answer)) + "\n")
    return 0


def as_text(answer: Answer) -> str:
    """The answer as tables."""
    curve = [
        {"objective ms": limit_ms, **({"cost": "nothing holds it"} if best is None else best.row())}
        for limit_ms, best in answer.curve
    ]
    bought = [one.row() for one in answer.others]
    return table("cheapest first", bought).strip("\n") + "\n" + table("by objective", curve)
