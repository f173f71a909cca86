"""`shapeshift scheduler`: the sidecar by itself, for a server that runs already; and its freeze switch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from shapeshift.scheduler import freeze, lock
from shapeshift.scheduler.settings import SchedulerSettings
from shapeshift.triton import record
from shapeshift.triton.keys import read_key

KEY_VARIABLE = "SHAPESHIFT_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift scheduler`; defaults stand in SchedulerSettings."""
    own = SchedulerSettings
    parser.add_argument("--server", metavar="HOST:GRPCPORT", help="its gRPC interface; that of the build folder's run")
    parser.add_argument("--metrics", metavar="URL", help="its metrics page; that of the build folder's run")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--repository", type=Path, action="append", metavar="DIR", help="folder of models; repeatable")
    parser.add_argument("--health-period", type=float, default=own.health_period_s, metavar="SECONDS")
    parser.add_argument("--plan-period", type=float, default=own.plan_period_s, metavar="SECONDS")
    parser.add_argument("--scale-period", type=float, default=own.scale_period_s, metavar="SECONDS")
    parser.add_argument("--batch", type=int, default=own.batch, help="workers changed at once; 0: an eighth")
    parser.add_argument("--dry-run", action="store_true", help="say each decision and its reason, do nothing")
    parser.add_argument("--freeze", action="store_true", help="let the sidecar decide but do nothing, and end")
    parser.add_argument("--thaw", action="store_true", help="let it work again, and end")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends")


def run(options: argparse.Namespace) -> int:
    """Work until told to stop and return 0. Raises ShapeshiftError, also where another sidecar is at work."""
    place = options.build / "run"
    if options.freeze or options.thaw:
        (freeze.freeze if options.freeze else freeze.thaw)(place)
        _say(f"{'frozen' if options.freeze else 'thawed'}: {place / freeze.FILE}\n")
        return 0
    settings = _settings(options, place)
    if settings.dry_run:
        return _work(settings, options.until_eof)
    with lock.sole_writer(place):
        return _work(settings, options.until_eof)


def addresses(place: Path) -> tuple[str, str] | None:
    """The gRPC address and metrics page of the server that runs, or last ran, in this run directory."""
    running = record.read(place / "server.json")
    if running is None:
        return None
    try:
        host, ports = str(running.about["host"]), dict(running.about["ports"])
        host = "127.0.0.1" if host == "0.0.0.0" else host
        return f"{host}:{ports['grpc']}", f"http://{host}:{ports['metrics']}/metrics"
    except (KeyError, TypeError, ValueError):
        return None


def key(place: Path) -> str:
    """The key to the server: from the environment, else from the run directory, else none."""
    if given := os.environ.get(KEY_VARIABLE):
        return given
    return read_key(place / "key") if (place / "key").exists() else ""


def _settings(options: argparse.Namespace, place: Path) -> SchedulerSettings:
    found = addresses(place) or (SchedulerSettings.server, SchedulerSettings.metrics)
    return SchedulerSettings(
        server=options.server or found[0],
        metrics=options.metrics or found[1],
        run_directory=place,
        repositories=tuple(options.repository or [options.build / "repository"]),
        health_period_s=options.health_period,
        plan_period_s=options.plan_period,
        scale_period_s=options.scale_period,
        batch=options.batch,
        dry_run=options.dry_run,
    )


def _work(settings: SchedulerSettings, until_eof: bool) -> int:
    # The gRPC client takes long to import, and the switch does not need it.
    from shapeshift.scheduler.sidecar import Sidecar

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    sidecar = Sidecar(settings, key(settings.run_directory), _say)
    sidecar.start()
    if until_eof:
        threading.Thread(target=_wait_for_end, args=(stop,), name="input", daemon=True).start()
    stop.wait()
    sidecar.stop()
    _say("scheduler stopped\n")
    # A load that still runs would hold up the interpreter's own end.
    os._exit(0)


def _wait_for_end(stop: threading.Event) -> None:
    """Nothing is ever written there: the pipe ends with the process that holds its other side."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    stop.set()


def _say(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        # Nobody reads it any more; the report has it too.
        return
