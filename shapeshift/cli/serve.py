"""`shapeshift serve`: start server and sidecar, say how to call the models, stop on Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import shapeshift
from shapeshift.engines import failures
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.scheduler import folders, report
from shapeshift.scheduler.child import SidecarProcess
from shapeshift.scheduler.settings import SchedulerSettings
from shapeshift.triton.names import check_model_name
from shapeshift.triton.server import ServerEndedError, TritonServer
from shapeshift.triton.settings import KNOWN_FLAWS, ServerSettings

_KEY_VARIABLE = "SHAPESHIFT_KEY"
_LOOK_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift serve`; defaults of the server stand in ServerSettings."""
    parser.add_argument("--models", metavar="NAME,...", help="models to load; all of the repository unless given")
    parser.add_argument("--repository", type=Path, action="append", metavar="DIR", help="folder of models; repeatable")
    parser.add_argument("--backends", type=Path, action="append", metavar="DIR", help="folder of backends; repeatable")
    parser.add_argument("--http-port", type=int, default=ServerSettings.http_port)
    parser.add_argument("--grpc-port", type=int, default=ServerSettings.grpc_port)
    parser.add_argument("--metrics-port", type=int, default=ServerSettings.metrics_port)
    parser.add_argument("--host", default=ServerSettings.host, help="address to bind to (%(default)s)")
    parser.add_argument("--allow-public", action="store_true", help="let --host be an address others can reach")
    parser.add_argument(
        "--external",
        metavar="HOST:GRPCPORT",
        help="load the models into a running server instead of starting one",
    )
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--triton", type=Path, metavar="DIR", help="another server than the one in the build folder")
    parser.add_argument("--ready-timeout", type=float, default=600.0, metavar="SECONDS", help="time to load everything")
    parser.add_argument("--strict", action="store_true", help="refuse to start while a model could not be built")
    parser.add_argument("--no-scheduler", action="store_true", help="leave the sidecar out")
    parser.add_argument(
        "--plan-period", type=float, default=SchedulerSettings.plan_period_s, metavar="SECONDS", help="of the sidecar"
    )


def serve(arguments: list[str]) -> int:
    """Run the command by itself: as `run`, or 2 after one line on standard error."""
    parser = argparse.ArgumentParser(prog="shapeshift serve", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except ShapeshiftError as error:
        sys.stderr.write(f"shapeshift serve: {error}\n")
        return 2


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop and return 0; 1 if the server ended by itself, 130 if interrupted while loading
    into an external one. Raises ShapeshiftError.
    """
    try:
        return _external(options) if options.external else _embedded(options)
    except ServerEndedError as error:
        sys.stderr.write(f"shapeshift serve: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def describe(models: Sequence[str], repositories: Sequence[Path], host: str, http_port: int, grpc_port: int) -> str:
    """What a user is told once the models are ready: how to call each of them."""
    values = {"{host}": host, "{http_port}": str(http_port), "{grpc_port}": str(grpc_port)}
    parts = []
    for model in models:
        files = [folder / model / "how_to_call.txt" for folder in repositories]
        found = next((file for file in files if file.is_file()), None)
        text = found.read_text() if found else "curl -i http://{host}:{http_port}/v2/models/" + model + "/ready"
        for name, value in values.items():
            text = text.replace(name, value)
        parts.append(f"\n{model}\n{text.rstrip()}\n")
    return "".join(parts)


def _embedded(options: argparse.Namespace) -> int:
    repositories = _repositories(options)
    models = _models(options, repositories)
    settings = ServerSettings(
        repositories=tuple(repositories),
        models=tuple(models),
        backend_directories=tuple(options.backends or _own_backends()),
        triton=options.triton or options.build / "triton",
        run_directory=options.build / "run",
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        allow_public=options.allow_public,
    )
    SchedulerSettings(plan_period_s=options.plan_period)
    beside = None if options.no_scheduler else SidecarProcess(settings, options.plan_period)
    with _told_to_stop() as stop, TritonServer(settings) as server, beside or contextlib.nullcontext() as sidecar:
        return _watch(server, sidecar, stop, options.ready_timeout)


def _watch(server: TritonServer, sidecar: SidecarProcess | None, stop: threading.Event, ready_timeout_s: float) -> int:
    settings = server.settings
    _say(f"loading {', '.join(settings.models)} (log: {settings.log})\n")
    # Workers are loaded by the sidecar; without any it has nothing to do before the server is ready.
    waits = sidecar is not None and _with_workers(settings.repositories, settings.models)
    if sidecar is not None and waits:
        sidecar.start()
    deadline = time.monotonic() + ready_timeout_s
    ready = False
    while not stop.wait(_LOOK_S):
        server.require_running()
        if sidecar is not None and (ready or waits):
            sidecar.keep()
        if not ready and (sidecar.has_settled() if sidecar is not None and waits else server.poll_ready()):
            ready = True
            _say(_greeting(server))
            if sidecar is not None and not waits:
                sidecar.start()
        if not ready and time.monotonic() > deadline:
            said = f" (its scheduler: {sidecar.last_line()})" if sidecar is not None and waits else ""
            raise server.failure(f"was not ready after {ready_timeout_s:g} s{said}")
    _say("stopping\n")
    if sidecar is not None:
        sidecar.stop()
    server.stop()
    _say("stopped\n")
    return 0


def _with_workers(repositories: Sequence[Path], models: Sequence[str]) -> bool:
    """Whether any of the models has workers for the sidecar to load."""
    return not folders.models(repositories)[1].isdisjoint(models)


def _greeting(server: TritonServer) -> str:
    settings = server.settings
    plans = (
        report.read(settings.run_directory).get("plans", {})
        if _with_workers(settings.repositories, settings.models)
        else {}
    )
    return (
        f"ready: http {server.http_url}, grpc {server.grpc_url}, metrics {server.metrics_url}\n"
        + (f"warning: others can reach this server, which has {KNOWN_FLAWS}\n" if settings.is_public else "")
        + f"models: {', '.join(settings.models)}\n"
        + "".join(f"workers of {name}: {found['plan']}\n" for name, found in plans.items())
        + describe(settings.models, settings.repositories, settings.reachable, settings.http_port, settings.grpc_port)
        + "\nCtrl-C stops the server\n"
    )


def _external(options: argparse.Namespace) -> int:
    # The gRPC client takes long to import, and only this needs it.
    from shapeshift.triton.control import ModelControl

    host, _, port = options.external.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInputError("--external", options.external, "must be HOST:GRPCPORT")
    repositories = _repositories(options)
    models = _models(options, repositories)
    with ModelControl(options.external, os.environ.get(_KEY_VARIABLE, "")) as control:
        _say(f"Triton {control.version()} at {options.external}\n")
        for model in models:
            _say(f"loading {model}\n")
            control.load(model, timeout_s=options.ready_timeout)
    if _with_workers(repositories, models):
        _say(f"their workers: `shapeshift scheduler --server {options.external} --metrics URL` loads them\n")
    _say(f"models: {', '.join(models)}\n" + describe(models, repositories, host, options.http_port, int(port)))
    return 0


def _repositories(options: argparse.Namespace) -> list[Path]:
    return options.repository or [options.build / "repository"]


def _models(options: argparse.Namespace, repositories: Sequence[Path]) -> list[str]:
    """The models to load; those that the last `make engines` could not build are named and left out.

    Raises EngineError where that leaves none, or with --strict where there is one.
    """
    asked = _asked(options, repositories)
    if options.repository:
        return asked
    failed = failures.read(options.build)
    # Without --models a model that was never built is missing from the generated repository.
    missing = [name for name in (asked if options.models else failed) if name in failed]
    models = [name for name in asked if name not in failed]
    if missing and (options.strict or not models):
        raise EngineError("; ".join(f"{name} could not be built: {failed[name]}" for name in missing))
    for name in missing:
        sys.stderr.write(f"shapeshift serve: left out {name}, which could not be built: {failed[name]}\n")
    return models


def _asked(options: argparse.Namespace, repositories: Sequence[Path]) -> list[str]:
    """The models of --models, or every folder of the repositories with a config.pbtxt that is no front's worker."""
    if options.models:
        return [check_model_name(name.strip()) for name in options.models.split(",")]
    for folder in repositories:
        if not folder.is_dir():
            raise NotFoundError(f"no model repository at {folder}; run `make engines`, or name one with --repository")
    found = sorted(folders.models(repositories)[0])
    if not found:
        raise NotFoundError(f"no models in {', '.join(map(str, repositories))}; run `make engines`")
    return found


def _own_backends() -> list[Path]:
    folder = Path(shapeshift.__file__).resolve().parents[1] / "backends"
    return [folder] if folder.is_dir() else []


@contextlib.contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set; a second signal changes nothing, the stop goes on."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _say(text: str) -> None:
    """Write for the user at once, also into a pipe; a reader that has gone does not end the server."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
