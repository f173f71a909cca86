"""`shapeshift fleet drain`: take one node out of a fleet on Ray without losing a request, or back into it."""

from __future__ import annotations

import argparse
from pathlib import Path

from shapeshift.cli.fleet.up import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift fleet drain`."""
    parser.add_argument("file", type=Path, help="the fleet file")
    parser.add_argument("node", help="the node")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="time to end all requests")
    parser.add_argument("--undo", action="store_true", help="start a node again that was drained")


def run(options: argparse.Namespace) -> int:
    """Drain the node, or start it again, and return 0 once that is done. Raises ShapeshiftError."""
    from shapeshift.fleet.supervision.ray_fleet import RayFleet

    fleet = RayFleet(options.file)
    fleet.connect()
    if options.undo:
        fleet.start(fleet.command_of(options.node), options.timeout, say)
    else:
        fleet.drain(options.node, options.timeout, say)
    return 0
