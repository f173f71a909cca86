"""`shapeshift sidecar`: run the sidecar for a running server, or freeze and thaw it."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

from shapeshift.cli.stop_signals import stop_event
from shapeshift.sidecar import run_files
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.embedded import run_record
from shapeshift.triton.keys import KEY_VARIABLE, read_key

_PORTS = ("http", "grpc", "metrics")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift sidecar`; the defaults are those of SidecarSettings."""
    own = SidecarSettings
    parser.add_argument("--server", metavar="HOST:GRPCPORT", help="gRPC address; default: from the build folder")
    parser.add_argument("--metrics", metavar="URL", help="metrics page; default: from the build folder")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--repository", type=Path, action="append", metavar="DIR", help="folder of models; repeatable")
    parser.add_argument("--health-period", type=float, default=own.health_period_s, metavar="SECONDS")
    parser.add_argument("--plan-period", type=float, default=own.plan_period_s, metavar="SECONDS")
    parser.add_argument("--scale-period", type=float, default=own.scale_period_s, metavar="SECONDS")
    parser.add_argument("--batch", type=int, default=own.batch, help="workers changed at once; 0: an eighth")
    parser.add_argument("--dry-run", action="store_true", help="log each decision and its reason, change nothing")
    parser.add_argument("--freeze", action="store_true", help="let the sidecar decide but change nothing, and exit")
    parser.add_argument("--thaw", action="store_true", help="let the sidecar make changes again, and exit")
    parser.add_argument("--until-eof", action="store_true", help="exit when standard input ends")


def run(options: argparse.Namespace) -> int:
    """Run the sidecar until a signal stops it, and return 0. Raises ShapeshiftError, also if another sidecar runs."""
    run_directory = options.build / "run"
    if options.freeze or options.thaw:
        (run_files.freeze if options.freeze else run_files.thaw)(run_directory)
        _write(f"{'frozen' if options.freeze else 'thawed'}: {run_directory / run_files.FREEZE_FILE}\n")
        return 0
    settings = _settings(options, run_directory)
    if settings.dry_run:
        return _run(settings, options.until_eof)
    with run_files.sole_sidecar(run_directory):
        return _run(settings, options.until_eof)


def addresses(run_directory: Path) -> tuple[str, str] | None:
    """gRPC address and metrics page of the server that runs, or last ran, in this run directory."""
    if (found := host_and_ports(run_directory)) is None:
        return None
    host, ports = found
    return f"{host}:{ports['grpc']}", f"http://{host}:{ports['metrics']}/metrics"


def host_and_ports(run_directory: Path) -> tuple[str, dict[str, int]] | None:
    """Address and ports (http, grpc, metrics) of the server that runs, or last ran, in this run directory."""
    running = run_record.read(run_directory / "server.json")
    if running is None:
        return None
    try:
        host, ports = str(running.about["host"]), running.about["ports"]
        return "127.0.0.1" if host == "0.0.0.0" else host, {name: int(ports[name]) for name in _PORTS}
    except (KeyError, TypeError, ValueError):
        return None


def server_key(run_directory: Path) -> str:
    """The key of the server: from the environment, else from the run directory, else empty."""
    if given := os.environ.get(KEY_VARIABLE):
        return given
    return read_key(run_directory / "key") if (run_directory / "key").exists() else ""


def _settings(options: argparse.Namespace, run_directory: Path) -> SidecarSettings:
    server, metrics = addresses(run_directory) or (SidecarSettings.server, SidecarSettings.metrics)
    return SidecarSettings(
        server=options.server or server,
        metrics=options.metrics or metrics,
        run_directory=run_directory,
        repositories=tuple(options.repository or [options.build / "repository"]),
        health_period_s=options.health_period,
        plan_period_s=options.plan_period,
        scale_period_s=options.scale_period,
        batch=options.batch,
        dry_run=options.dry_run,
    )


def _run(settings: SidecarSettings, until_eof: bool) -> int:
    # The gRPC client is slow to import, and --freeze and --thaw do not need it.
    from shapeshift.sidecar.sidecar import Sidecar

    with stop_event() as stop:
        sidecar = Sidecar(settings, server_key(settings.run_directory), _write)
        sidecar.start()
        if until_eof:
            threading.Thread(target=_wait_for_eof, args=(stop,), name="input", daemon=True).start()
        stop.wait()
        sidecar.stop()
        _write("sidecar stopped\n")
        # Do not wait for the thread of a running load.
        os._exit(0)


def _wait_for_eof(stop: threading.Event) -> None:
    """Set `stop` when the process that holds the other end of the input pipe has ended."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    stop.set()


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        # Nobody reads the output any more; the report has the decisions, too.
        return
