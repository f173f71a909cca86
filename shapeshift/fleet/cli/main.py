"""`shapeshift fleet`: many machines behind one front."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from shapeshift.fleet.cli import status
from shapeshift.fleet.manifests import KINDS, ManifestSettings, render
from shapeshift.fleet.supervision.ray_fleet import READY, RayFleet
from shapeshift.fleet.supervision.upgrade import UpgradeSettings, upgrade
from shapeshift.sidecar.settings import SidecarSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands of `shapeshift fleet`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        command = actions.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        return command

    up = action("up", _up, "start the nodes of a fleet on Ray, and its sidecar")
    up.add_argument("file", type=Path, help="the fleet file, with a section [ray]")
    up.add_argument("--no-sidecar", action="store_true", help="start no sidecar")
    _seconds(up, "--plan-period", SidecarSettings.plan_period_s, "the sidecar's")
    _seconds(up, "--ready-timeout", 1800.0, "time to load everything")

    down = action("down", _down, "drain and stop all nodes of a fleet on Ray")
    down.add_argument("file", type=Path, help="the fleet file")
    _seconds(down, "--timeout", 120.0, "time to end all requests")

    drain = action("drain", _drain, "take one node out of a fleet on Ray without losing a request")
    drain.add_argument("file", type=Path, help="the fleet file")
    drain.add_argument("node", help="the node")
    _seconds(drain, "--timeout", 120.0, "time to end all requests")
    drain.add_argument("--undo", action="store_true", help="start a node again that was drained")

    upgraded = action("upgrade", _upgrade, "serve a fleet on Ray as its file says now, one node at a time")
    upgraded.add_argument("file", type=Path, help="the fleet file, with the new build folder or options")
    upgraded.add_argument("--canary", type=float, default=UpgradeSettings.canary, help="share of nodes that go first")
    _seconds(upgraded, "--watch", UpgradeSettings.watch_s, "they serve alone")
    upgraded.add_argument("--max-errors", type=float, default=UpgradeSettings.max_errors, help="share that may fail")

    summary = "show the nodes of a fleet, their workers, load and the last decisions"
    status.add_arguments(action("status", status.run, summary))

    manifests = action("manifests", _manifests, "print the files of a fleet for Kubernetes or KubeRay")
    manifests.add_argument("kind", choices=KINDS, help="plain Kubernetes, or KubeRay")
    for field in fields(ManifestSettings):
        option, text = f"--{field.name.replace('_', '-')}", f"{field.metadata['help']} (%(default)s)"
        manifests.add_argument(option, type=type(field.default), default=field.default, help=text)


def run(options: argparse.Namespace) -> int:
    """Run one subcommand and return its exit status. Raises ShapeshiftError."""
    return int(options.run(options))


def _seconds(parser: argparse.ArgumentParser, option: str, default: float, text: str) -> None:
    parser.add_argument(option, type=float, default=default, metavar="SECONDS", help=f"{text} (%(default)s)")


def _up(options: argparse.Namespace) -> int:
    """Start what does not run yet, and wait until all nodes are ready."""
    fleet = RayFleet(options.file)
    fleet.up(None if options.no_sidecar else options.plan_period)
    fleet.wait(fleet.names, READY, options.ready_timeout, _say)
    _say(f"the fleet is up: `shapeshift fleet status {options.file}` shows it, `shapeshift fleet down` stops it\n")
    return 0


def _down(options: argparse.Namespace) -> int:
    """Stop the fleet, and the cluster that `fleet up` has started."""
    RayFleet(options.file).down(options.timeout, _say)
    return 0


def _drain(options: argparse.Namespace) -> int:
    """Drain the node, or start it again, and wait until that is done."""
    fleet = RayFleet(options.file)
    fleet.connect()
    if options.undo:
        fleet.start(fleet.command_of(options.node), options.timeout, _say)
    else:
        fleet.drain(options.node, options.timeout, _say)
    return 0


def _upgrade(options: argparse.Namespace) -> int:
    """Upgrade all nodes. Raises ShapeshiftError also after going back."""
    settings = UpgradeSettings(options.canary, options.watch, options.max_errors)
    fleet = RayFleet(options.file)
    fleet.connect()
    upgrade(fleet, [fleet.command_of(name) for name in fleet.names], settings, _say)
    return 0


def _manifests(options: argparse.Namespace) -> int:
    """Write the file to standard output. Raises InvalidInputError with the name of the field."""
    values: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(ManifestSettings)}
    sys.stdout.write(render(options.kind, ManifestSettings(**values)))
    return 0


def _say(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
