"""`shapeshift fleet down`: drain and stop all nodes of a fleet on Ray."""

from __future__ import annotations

import argparse
from pathlib import Path

from shapeshift.cli.fleet.up import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift fleet down`."""
    parser.add_argument("file", type=Path, help="the fleet file")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="time to end all requests")


def run(options: argparse.Namespace) -> int:
    """Stop the fleet, and the cluster that `fleet up` has started, and return 0. Raises ShapeshiftError."""
    from shapeshift.fleet.supervision.ray_fleet import RayFleet

    RayFleet(options.file).down(options.timeout, say)
    return 0
