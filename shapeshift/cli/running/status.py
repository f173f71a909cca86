"""`shapeshift status`: fronts, workers, traffic, plan and sidecar of a running server."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shapeshift.cli.sidecar import ServerAddress, running_at, server_key
from shapeshift.errors import NotFoundError
from shapeshift.settings import require

# The cursor to the first line, and nothing below it.
_CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift status`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--server", metavar="HOST:GRPCPORT", help="gRPC address; default: from the build folder")
    parser.add_argument("--metrics", metavar="URL", help="metrics page; default: from the build folder")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C")
    parser.add_argument("--seconds", type=float, default=2.0, help="for how long traffic is measured (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Write the overview to standard output. Raises ShapeshiftError if the server does not answer."""
    # The gRPC client is slow to import.
    from shapeshift.sidecar.overview import overview
    from shapeshift.sidecar.servers import connect
    from shapeshift.triton.embedded.process_tracker import ProcessTracker

    require(0.5 <= options.seconds <= 3600, "seconds", options.seconds, "must be 0.5 to 3600")
    run_directory = options.build / "run"
    running = running_at(run_directory)
    key = server_key(run_directory)
    if running is None and not (options.server or options.metrics or key):
        raise NotFoundError(f"no server has run in {run_directory}; name the build folder of the server with --build")
    at = running or ServerAddress()
    servers = connect(options.server or at.grpc, options.metrics or at.metrics, key)
    local = running is not None and options.server in (None, at.grpc)
    while True:
        shown = overview(servers, run_directory, ProcessTracker(local), options.seconds)
        text = json.dumps(shown) + "\n" if options.json else format_overview(shown)
        sys.stdout.write(f"{_CLEAR}{text}" if options.watch and sys.stdout.isatty() else text)
        sys.stdout.flush()
        if not options.watch:
            return 0


def format_overview(shown: dict[str, Any]) -> str:
    """The overview as text and tables."""
    parts = [_sidecar(shown["sidecar"])]
    for front in shown["fronts"]:
        parts.append(_front(front))
        workers = [worker for worker in shown["workers"] if worker["front"] == front["name"]]
        if workers:
            head = ["worker", "bin", "generation", "state", "pid", "outstanding", "timeouts"]
            names = ["name", "bin", "generation", "state", "pid", "outstanding", "timeouts"]
            rows = table([head, *([_cell(name, worker[name]) for name in names] for worker in workers)])
            parts.append(rows + _work(workers, "work of all workers"))
    for model in shown["models"]:
        line = f"{model['name']}: {model['state']}, pid {_cell('pid', model['pid'])}\n"
        parts.append(line + _work([model]))
    parts += [f"{model}: {problem}\n" for model, problem in shown["problems"].items()]
    return "\n".join(parts)


def _sidecar(sidecar: dict[str, Any]) -> str:
    state = f"running, pid {sidecar['pid']}" if sidecar["pid"] else "not running"
    frozen = "; frozen, `shapeshift sidecar --thaw` ends that" if sidecar["frozen"] else ""
    return f"sidecar: {state}{frozen}\n"


def _front(front: dict[str, Any]) -> str:
    reason = f" ({front['placement_reason']})" if front["placement_reason"] else ""
    objective = f", objective {front['slo_ms']:g} ms" if front["slo_ms"] else ""
    p98 = "no answers" if front["p98_ms"] is None else f"p98 {front['p98_ms']:g} ms"
    lines = [
        f"{front['name']}: {front['state']}, pid {_cell('pid', front['pid'])}, {front['placement']}{reason}{objective}",
        f"  traffic: {front['texts_per_s']:g} texts/s, {front['requests_per_s']:g} answers/s, {p98},"
        f" {front['waiting']} waiting, {front['running']} running",
    ]
    if plan := front["plan"]:
        lines.append(f"  plan of {plan['at']}: {plan['plan']}; {plan['reason']}")
    return "\n".join(lines) + "\n" + _work(front["models"])


def _work(models: Sequence[Mapping[str, Any]], name: str = "work") -> str:
    """A line of what these processes did since they began, and hold; none where they did nothing."""
    total: Counter[str] = Counter()
    for model in models:
        total.update(model.get("work", {}))
    return f"  {name}: {', '.join(f'{value:.6g} {words}' for words, value in total.items())}\n" if total else ""


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as text with columns, two spaces before each line."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return "all" if name == "bin" and value == 0 else str(value)
