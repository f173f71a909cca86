"""`shapeshift sidecar`: run the sidecar for a running server, or freeze and thaw it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shapeshift import process_log
from shapeshift.child_process import ChildProcess, add_until_eof, at_end_of_input
from shapeshift.cli.stop_signals import stop_event
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.sidecar import run_files
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.embedded import processes, run_record
from shapeshift.triton.keys import KEY_VARIABLE, read_key
from shapeshift.triton.settings import ServerSettings

if TYPE_CHECKING:
    from shapeshift.sidecar.servers import Fleet

LOG_FILE = "sidecar.log"
_WITH_WATCH_ALL = {"--hang-seconds": "hang_seconds", "--except": "spared", "--most-reloads": "most_reloads"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift sidecar`; the defaults are those of SidecarSettings."""
    parser.add_argument("url", nargs="?", metavar="HOST:GRPCPORT", help="as --server, with metrics on port 8002")
    parser.add_argument("--server", metavar="HOST:GRPCPORT", help="gRPC address; default: from the build folder")
    parser.add_argument("--metrics", metavar="URL", help="metrics page; default: from the build folder")
    parser.add_argument("--fleet", type=Path, metavar="FILE", help="fleet file: one sidecar for all nodes of a fleet")
    parser.add_argument("--node", default="", metavar="NAME", help="with --fleet: whose certificate is shown")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--repository", type=Path, action="append", metavar="DIR", help="folder of models; repeatable")
    period_s = SidecarSettings.plan_period_s
    parser.add_argument(
        "--plan-period", type=float, default=period_s, metavar="SECONDS", help="seconds between two plans"
    )
    check_s, text = SidecarSettings.check_seconds, "least time between two checks of answers; 0: none"
    parser.add_argument("--check-seconds", type=float, default=check_s, metavar="N", help=text)
    parser.add_argument("--watch-all", action="store_true", help="reload every Python model that dies or hangs")
    parser.add_argument(
        "--hang-seconds",
        type=float,
        default=SidecarSettings.hang_seconds,
        metavar="N",
        help="with --watch-all: a model hangs if requests wait and none ends for so long; 0: not looked at",
    )
    parser.add_argument(
        "--except", dest="spared", action="append", metavar="MODEL", help="with --watch-all: not this one; repeatable"
    )
    parser.add_argument(
        "--most-reloads",
        type=int,
        default=SidecarSettings.most_reloads,
        metavar="N",
        help="with --watch-all: then a model that dies again and again is left alone",
    )
    parser.add_argument("--dry-run", action="store_true", help="log each decision and its reason, change nothing")
    parser.add_argument("--freeze", action="store_true", help="let the sidecar decide but change nothing, and exit")
    parser.add_argument("--thaw", action="store_true", help="let the sidecar make changes again, and exit")
    process_log.add_option(parser)
    add_until_eof(parser)


def run(options: argparse.Namespace) -> int:
    """Run the sidecar until a signal stops it, and return 0. Raises ShapeshiftError, also if another sidecar runs."""
    # The gRPC client is slow to import, and --freeze and --thaw of a single server do not need it.
    fleet = None
    if options.fleet:
        from shapeshift.sidecar.servers import open_fleet

        fleet = open_fleet(options.fleet, options.node)
    run_directory = run_directory_of(options.build, fleet.name if fleet else "")
    if options.freeze or options.thaw:
        (run_files.freeze if options.freeze else run_files.thaw)(run_directory)
        sys.stdout.write(f"{'frozen' if options.freeze else 'thawed'}: {run_directory / run_files.FREEZE_FILE}\n")
        return 0
    if fleet and (options.url or options.server or options.metrics or options.watch_all):
        text = "names the servers: --server, --metrics and --watch-all do not apply"
        raise InvalidInputError("fleet", str(options.fleet), text)
    if options.url and options.server:
        raise InvalidInputError("server", options.server, f"{options.url} is named, too: name one")
    # A fleet's nodes have their own files, which are here only if the user says so.
    repositories = options.repository or ([] if fleet else [options.build / "repository"])
    settings = SidecarSettings(
        run_directory=run_directory,
        repositories=tuple(repositories),
        plan_period_s=options.plan_period,
        dry_run=options.dry_run,
        check_seconds=options.check_seconds,
        watch_all=options.watch_all,
        hang_seconds=options.hang_seconds,
        spared=tuple(options.spared or ()),
        most_reloads=options.most_reloads,
    )
    for option, name in _WITH_WATCH_ALL.items():
        value = getattr(settings, name)
        is_read = settings.watch_all or value == getattr(SidecarSettings, name)
        require(is_read, option, value, "goes with --watch-all: nothing else reads it")
    process_log.set_up(options.log, sys.stdout)
    with contextlib.nullcontext() if settings.dry_run else run_files.sole_sidecar(run_directory):
        return _run(settings, options, fleet)


class SidecarProcess(ChildProcess):
    """`shapeshift sidecar` for the server with these settings; it logs to `LOG_FILE` in the run directory."""

    def __init__(self, settings: ServerSettings, plan_period_s: float, log: str = "") -> None:
        self._run_directory = settings.run_directory
        options = {
            "--build": settings.run_directory.parent,
            "--server": settings.grpc_url,
            "--metrics": settings.metrics_url,
            "--plan-period": plan_period_s,
            "--log": log,
        }
        arguments = [f"{name}={value}" for name, value in options.items()]
        arguments += [f"--repository={folder}" for folder in settings.repositories]
        super().__init__("sidecar", arguments, settings.run_directory / LOG_FILE, settings.shared_variables)

    def has_settled(self, fronts: Collection[str] = ()) -> bool:
        """Whether the sidecar has loaded the workers of the first plan, or has logged why it could not.

        fronts: of these, which may have been loaded after the sidecar was started.
        """
        report = run_files.read_report(self._run_directory)
        if report.get("pid") != run_files.lock_holder(self._run_directory):
            return False
        settled = report.get("settled")
        return isinstance(settled, list) and {*fronts} <= {*settled}


def run_directory_of(build: Path, fleet: str = "") -> Path:
    """Where the sidecar of a server, or of a fleet, keeps its lock, switch and report."""
    return build / "fleet" / fleet if fleet else build / "run"


@dataclass(frozen=True)
class ServerAddress:
    """Where a server of this machine is reached: one of which nothing else is known, by default."""

    host: str = ServerSettings.host
    http_port: int = ServerSettings.http_port
    grpc_port: int = ServerSettings.grpc_port
    metrics_port: int = ServerSettings.metrics_port
    grpc_host: str = ServerSettings.host

    @property
    def grpc(self) -> str:
        """HOST:PORT of gRPC."""
        return f"{self.grpc_host}:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        """The URL of the metrics page."""
        return f"http://{self.host}:{self.metrics_port}/metrics"


def running_at(run_directory: Path) -> ServerAddress | None:
    """Where the server is that runs, or last ran, in this run directory."""
    if (running := run_record.read(run_directory / "server.json")) is None:
        return None
    try:
        host, ports = str(running.about["host"]), running.about["ports"]
        http, grpc, metrics = (int(ports[name]) for name in ("http", "grpc", "metrics"))
        grpc_host = str(running.about.get("grpc_host", host))
        return ServerAddress(_reachable(host), http, grpc, metrics, _reachable(grpc_host))
    except (KeyError, TypeError, ValueError):
        return None


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def server_key(run_directory: Path) -> str:
    """The key of the server: from the environment, else from the run directory, else empty."""
    if key := os.environ.get(KEY_VARIABLE):
        return key
    return read_key(run_directory / "key") if (run_directory / "key").exists() else ""


def _run(settings: SidecarSettings, options: argparse.Namespace, fleet: Fleet | None) -> int:
    from shapeshift.sidecar.servers import connect
    from shapeshift.sidecar.sidecar import Sidecar

    with stop_event() as stop:
        if fleet is not None:
            sidecar = Sidecar(settings, partial(fleet.connect, settings), f"fleet {fleet.name}")
        else:
            folder = settings.run_directory
            at = running_at(folder) or ServerAddress()
            running = at.grpc, at.metrics
            if options.url:
                running = options.url, f"http://{options.url.rpartition(':')[0]}:{ServerSettings.metrics_port}/metrics"
            server, page, key = options.server or running[0], options.metrics or running[1], server_key(folder)
            is_local, port = _is_local(folder, server), _port_here(server)
            sidecar = Sidecar(settings, lambda _: connect(server, page, key), f"server {server}", is_local, port)
        sidecar.start()
        if options.until_eof:
            at_end_of_input(stop.set)
        stop.wait()
        sidecar.stop()
        logging.getLogger("shapeshift.sidecar").info("sidecar stopped")
        # Do not wait for the thread of a running load.
        os._exit(0)


def _is_local(run_directory: Path, server: str) -> bool:
    """Whether the server at this address is that of the run directory, so that its processes are visible here."""
    running = run_record.read(run_directory / "server.json")
    if running is None or not processes.is_alive(running.server):
        return False
    return server.endswith(f":{running.about.get('ports', {}).get('grpc')}")


def _port_here(server: str) -> int | None:
    """The port of HOST:PORT if the host is this machine, else None."""
    host, _, port = server.rpartition(":")
    try:
        # Only an address of this machine can be bound to.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host.strip("[]"), 0))
        return int(port)
    except (OSError, ValueError):
        return None
