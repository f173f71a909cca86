"""`shapeshift fleet upgrade`: serve a fleet on Ray as its file says now, one node at a time."""

from __future__ import annotations

import argparse
from pathlib import Path

from shapeshift.cli.fleet.up import say
from shapeshift.fleet.supervision.upgrade import UpgradeSettings, upgrade


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift fleet upgrade`; the defaults are those of UpgradeSettings."""
    own = UpgradeSettings
    parser.add_argument("file", type=Path, help="the fleet file, with the new build folder or options")
    parser.add_argument(
        "--canary", type=float, default=own.canary, help="share of the nodes that go first (%(default)s)"
    )
    parser.add_argument(
        "--watch", type=float, default=own.watch_s, metavar="SECONDS", help="they serve alone (%(default)s)"
    )
    parser.add_argument("--max-errors", type=float, default=own.max_errors, help="share that may fail (%(default)s)")
    parser.add_argument("--timeout", type=float, default=own.timeout_s, metavar="SECONDS", help="for each node")


def run(options: argparse.Namespace) -> int:
    """Upgrade all nodes and return 0. Raises ShapeshiftError, also after going back."""
    settings = UpgradeSettings(options.canary, options.watch, options.max_errors, options.timeout)
    from shapeshift.fleet.supervision.ray_fleet import RayFleet

    fleet = RayFleet(options.file)
    fleet.connect()
    with fleet.nodes_held():
        upgrade(fleet, [fleet.command_of(name) for name in fleet.names], settings, say)
    return 0
