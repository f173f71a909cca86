"""`shapeshift fleet status`: the nodes of a fleet, their workers, load and the last decisions."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from shapeshift import process_log
from shapeshift.cli.running.status import format_overview, table
from shapeshift.cli.sidecar import run_directory_of
from shapeshift.fleet import settings
from shapeshift.fleet.settings import FleetSettings, RaySettings
from shapeshift.fleet.supervision.plan import SIDECAR
from shapeshift.settings import require

# A node that takes longer to answer is shown as one that does not.
_LIMIT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift fleet status`."""
    parser.add_argument("file", type=Path, help="the fleet file")
    parser.add_argument("--node", default="", metavar="NAME", help="whose certificate is shown to the nodes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--build", type=Path, help="build folder of the sidecar (on Ray that of its actor on this machine, else build)"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for how long traffic is measured (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Write the overview to standard output. Raises ShapeshiftError if no node answers."""
    # The gRPC client is slow to import.
    from shapeshift.fleet.membership import open_membership
    from shapeshift.fleet.sidecar.connections import FleetConnections
    from shapeshift.fleet.sidecar.fleet import servers_of
    from shapeshift.sidecar.journal import Journal
    from shapeshift.sidecar.overview import overview
    from shapeshift.triton.embedded.process_tracker import ProcessTracker

    require(0.5 <= options.seconds <= 3600, "seconds", options.seconds, "must be 0.5 to 3600")
    fleet = settings.read(options.file, options.node)
    # What is wrong with a node is written where it is left out.
    process_log.set_up("", sys.stderr)
    journal = Journal(logging.getLogger("shapeshift.fleet"), lambda report: None, {})
    connections = FleetConnections(open_membership(options.file, options.node), journal)
    quiet = Journal(logging.Logger("quiet", logging.CRITICAL + 1), lambda report: None, {})
    servers = servers_of(connections, quiet, _LIMIT_S)
    run_directory = sidecar_directory(options.file, fleet, options.build)
    shown = overview(servers, run_directory, ProcessTracker(local=False), options.seconds)
    sys.stdout.write(json.dumps(shown) + "\n" if options.json else format_fleet(fleet.name, shown))
    return 0


def sidecar_directory(file: Path, fleet: FleetSettings, build: Path | None = None) -> Path:
    """The run directory of the fleet's sidecar. build: its build folder, None where none is named."""
    if build is None and isinstance(fleet.source, RaySettings):
        build = file.resolve().parent / fleet.source.folder / SIDECAR
    return run_directory_of(build or Path("build"), fleet.name)


def format_fleet(name: str, shown: dict[str, Any]) -> str:
    """The overview of the fleet as text and tables: first its nodes, last the decisions."""
    head = ["node", "state", "Triton", "workers", "texts/s", "problem"]
    fields = ("name", "state", "version", "workers", "texts_per_s", "problem")
    rows = [["-" if node[field] is None else str(node[field]) for field in fields] for node in shown["nodes"]]
    parts = [f"fleet: {name}\n", table([head, *rows]), format_overview(shown)]
    if decisions := shown["sidecar"]["decisions"]:
        lines = (f"  {one['at']} {one['kind']} {one['subject']}: {one['text']}\n" for one in decisions)
        parts.append("last decisions:\n" + "".join(lines))
    return "\n".join(parts)
