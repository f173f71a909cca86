"""`shapeshift fleet`: many machines behind one front."""

from __future__ import annotations

import argparse

from shapeshift.cli.fleet import down, drain, manifests, status, up, upgrade

# Subcommand: (module with add_arguments(parser) and run(options) -> exit status, summary).
SUBCOMMANDS = {
    "up": (up, "start the nodes of a fleet on Ray, and its sidecar"),
    "down": (down, "drain and stop all nodes of a fleet on Ray"),
    "drain": (drain, "take one node out of a fleet on Ray without losing a request"),
    "upgrade": (upgrade, "serve a fleet on Ray as its file says now, one node at a time"),
    "status": (status, "show the nodes of a fleet, their workers, load, versions and the last decisions"),
    "manifests": (manifests, "print the files of a fleet for Kubernetes or KubeRay"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands of `shapeshift fleet`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (module, summary) in SUBCOMMANDS.items():
        module.add_arguments(actions.add_parser(name, help=summary, description=summary))


def run(options: argparse.Namespace) -> int:
    """Run one subcommand and return its exit status. Raises ShapeshiftError."""
    return int(SUBCOMMANDS[options.action][0].run(options))
