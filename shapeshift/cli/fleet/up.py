"""`shapeshift fleet up`: start the nodes of a fleet on Ray, and its sidecar."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shapeshift.sidecar.settings import SidecarSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift fleet up`."""
    parser.add_argument("file", type=Path, help="the fleet file, with membership ray")
    parser.add_argument("--no-sidecar", action="store_true", help="start no sidecar")
    own = SidecarSettings.plan_period_s
    parser.add_argument("--plan-period", type=float, default=own, metavar="SECONDS", help="the sidecar's (%(default)s)")
    parser.add_argument(
        "--ready-timeout", type=float, default=1800.0, metavar="SECONDS", help="time to load everything"
    )


def run(options: argparse.Namespace) -> int:
    """Start what does not run yet, wait until all nodes are ready, and return 0. Raises ShapeshiftError."""
    from shapeshift.fleet.supervision.ray_fleet import READY, RayFleet

    fleet = RayFleet(options.file)
    fleet.up(None if options.no_sidecar else options.plan_period)
    fleet.wait(fleet.names, READY, options.ready_timeout, say)
    say(f"the fleet is up: `shapeshift fleet status {options.file}` shows it, `shapeshift fleet down` stops it\n")
    return 0


def say(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
