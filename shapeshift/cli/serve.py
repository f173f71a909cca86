"""`shapeshift serve`: start server and sidecar, print how to call the models, stop on Ctrl-C or SIGTERM."""

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

from shapeshift import installation
from shapeshift.backoff import Backoff
from shapeshift.cli.served_models import models_to_load
from shapeshift.engines import capacity
from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.sidecar import run_files
from shapeshift.sidecar.child import SidecarProcess
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton import model_config
from shapeshift.triton.embedded.server import ServerEndedError, TritonServer
from shapeshift.triton.keys import KEY_VARIABLE
from shapeshift.triton.settings import KNOWN_VULNERABILITIES, ServerSettings

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift serve`; the defaults of the server are those of ServerSettings."""
    parser.add_argument("--models", metavar="NAME,...", help="models to load; default: all of the repository")
    parser.add_argument("--repository", type=Path, action="append", metavar="DIR", help="folder of models; repeatable")
    parser.add_argument("--backends", type=Path, action="append", metavar="DIR", help="folder of backends; repeatable")
    parser.add_argument("--http-port", type=int, default=ServerSettings.http_port)
    parser.add_argument("--grpc-port", type=int, default=ServerSettings.grpc_port)
    parser.add_argument("--metrics-port", type=int, default=ServerSettings.metrics_port)
    parser.add_argument("--host", default=ServerSettings.host, help="address to bind to (%(default)s)")
    parser.add_argument("--allow-public", action="store_true", help="allow a --host that others can reach")
    parser.add_argument(
        "--external",
        metavar="HOST:GRPCPORT",
        help="load the models into a running server instead of starting one",
    )
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--triton", type=Path, metavar="DIR", help="use another server than that of the build folder")
    parser.add_argument("--print-models", action="store_true", help="print the models to load, one a line, and exit")
    parser.add_argument("--ready-timeout", type=float, default=600.0, metavar="SECONDS", help="time to load everything")
    parser.add_argument("--no-restart", action="store_true", help="end when the server ends by itself")
    parser.add_argument("--strict", action="store_true", help="do not start if a model could not be built")
    parser.add_argument("--no-sidecar", "--no-scheduler", action=_NoSidecar, help="start no sidecar")
    parser.add_argument(
        "--plan-period", type=float, default=SidecarSettings.plan_period_s, metavar="SECONDS", help="the sidecar's"
    )


class _NoSidecar(argparse.Action):
    """Sets its destination to True; `--no-scheduler`, the old name, works for one more version."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002  argparse's name
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if option == "--no-scheduler":
            sys.stderr.write("shapeshift serve: --no-scheduler is deprecated; use --no-sidecar\n")
        setattr(namespace, self.dest, True)


def serve(arguments: list[str]) -> int:
    """Parse `arguments` and `run` them; returns 2 after one line on standard error for a ShapeshiftError."""
    parser = argparse.ArgumentParser(prog="shapeshift serve", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except ShapeshiftError as error:
        sys.stderr.write(f"shapeshift serve: {error}\n")
        return 2


def run(options: argparse.Namespace) -> int:
    """Serve until a signal stops it and return 0.

    Returns 1 if the server ended by itself and is not restarted, 130 after Ctrl-C while models are loaded into an
    external server. Raises ShapeshiftError.
    """
    if options.print_models:
        _write("".join(f"{name}\n" for name in models_to_load(options, _repositories(options))))
        return 0
    try:
        return _external(options) if options.external else _embedded(options)
    except ServerEndedError as error:
        sys.stderr.write(f"shapeshift serve: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def describe(models: Sequence[str], repositories: Sequence[Path], host: str, http_port: int, grpc_port: int) -> str:
    """How to call each model, for the user. Placeholders of how_to_call.txt are filled in."""
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
    models = models_to_load(options, repositories)
    settings = ServerSettings(
        repositories=tuple(repositories),
        models=tuple(models),
        backend_directories=tuple(options.backends or [installation.BACKENDS]),
        triton=options.triton or options.build / "triton",
        run_directory=options.build / "run",
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        allow_public=options.allow_public,
    )
    SidecarSettings(plan_period_s=options.plan_period)
    _write(_capacity(repositories, models))
    with _stop_signals() as stop:
        return _supervise(options, settings, stop)


def _capacity(repositories: Sequence[Path], models: Sequence[str]) -> str:
    """The line about the machine and what the models ask for. Raises UnsupportedError for one that cannot fit."""
    asks = []
    for file in (folder / name / "config.pbtxt" for name in models for folder in repositories):
        # Of a file that is not there or cannot be read the server says what is wrong.
        with contextlib.suppress(ShapeshiftError, OSError):
            asks.append(
                capacity.ask_of(file.parent.name, file.parent, model_config.parameters(model_config.read(file)))
            )
    return capacity.require_fit(asks, capacity.this_machine()) + "\n"


def _supervise(options: argparse.Namespace, settings: ServerSettings, stop: threading.Event) -> int:
    """Serve until `stop` is set. A server that was ready once and ends by itself is started again.

    Raises ServerEndedError for one that ends before it was ready the first time, or with --no-restart.
    """
    backoff, restarts, ready_at = Backoff(), 0, [0.0]
    while True:
        sidecar = None if options.no_sidecar else SidecarProcess(settings, options.plan_period)
        ran_since = ready_at[0]
        try:
            with TritonServer(settings) as server, sidecar or contextlib.nullcontext():
                return _watch(server, sidecar, stop, options.ready_timeout, ready_at)
        except (ShapeshiftError, OSError) as error:
            # If the first start fails, an option or a model is wrong; later starts are tried again.
            if options.no_restart or not ready_at[0]:
                raise
            restarts += 1
            pause_s = backoff.pause(time.monotonic() - ready_at[0] if ready_at[0] != ran_since else 0.0)
            _write(
                f"{error}\nrestart {restarts} in {pause_s:g} s; the log of the server that ended: {settings.log}.1\n"
            )
            if stop.wait(pause_s):
                return 0


def _watch(
    server: TritonServer,
    sidecar: SidecarProcess | None,
    stop: threading.Event,
    ready_timeout_s: float,
    ready_at: list[float],
) -> int:
    """Start the sidecar when it is needed and say when the models are ready; returns 0 once `stop` is set.

    ready_at: its one number becomes the monotonic time at which they were ready. Raises ServerEndedError for a server
    that ends by itself.
    """
    settings = server.settings
    _write(f"loading {', '.join(settings.models)} (log: {settings.log})\n")
    # Only a sidecar that loads workers is needed before the server is ready.
    loads_workers = sidecar is not None and _has_workers(settings.repositories, settings.models)
    if sidecar is not None and loads_workers:
        sidecar.start()
    deadline = time.monotonic() + ready_timeout_s
    ready = False
    while not stop.wait(_POLL_S):
        server.require_running()
        if sidecar is not None and (ready or loads_workers):
            sidecar.restart_if_ended()
        if not ready and (sidecar.has_settled() if sidecar is not None and loads_workers else server.poll_ready()):
            ready = True
            ready_at[0] = time.monotonic()
            _write(_greeting(server))
            if sidecar is not None and not loads_workers:
                sidecar.start()
        if not ready and time.monotonic() > deadline:
            last = f" (sidecar: {sidecar.last_line()})" if sidecar is not None and loads_workers else ""
            raise server.failure(f"was not ready after {ready_timeout_s:g} s{last}")
    _write("stopping\n")
    if sidecar is not None:
        sidecar.stop()
    server.stop()
    _write("stopped\n")
    return 0


def _has_workers(repositories: Sequence[Path], models: Sequence[str]) -> bool:
    """Whether any of the models has workers."""
    return not run_files.repository_models(repositories)[1].isdisjoint(models)


def _greeting(server: TritonServer) -> str:
    settings = server.settings
    plans = (
        run_files.read_report(settings.run_directory).get("plans", {})
        if _has_workers(settings.repositories, settings.models)
        else {}
    )
    return (
        f"ready: http {server.http_url}, grpc {server.grpc_url}, metrics {server.metrics_url}\n"
        + (f"warning: other machines can reach this server ({KNOWN_VULNERABILITIES})\n" if settings.is_public else "")
        + f"models: {', '.join(settings.models)}\n"
        + "".join(f"workers of {name}: {found['plan']}\n" for name, found in plans.items())
        + describe(settings.models, settings.repositories, settings.reachable, settings.http_port, settings.grpc_port)
        + "\nCtrl-C stops the server\n"
    )


def _external(options: argparse.Namespace) -> int:
    # The gRPC client is slow to import.
    from shapeshift.triton.control import ModelControl

    host, _, port = options.external.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInputError("--external", options.external, "must be HOST:GRPCPORT")
    repositories = _repositories(options)
    models = models_to_load(options, repositories)
    with ModelControl(options.external, os.environ.get(KEY_VARIABLE, "")) as control:
        _write(f"Triton {control.version()} at {options.external}\n")
        for model in models:
            _write(f"loading {model}\n")
            control.load(model, timeout_s=options.ready_timeout)
    if _has_workers(repositories, models):
        _write(f"to load their workers: `shapeshift sidecar --server {options.external} --metrics URL`\n")
    _write(f"models: {', '.join(models)}\n" + describe(models, repositories, host, options.http_port, int(port)))
    return 0


def _repositories(options: argparse.Namespace) -> list[Path]:
    return options.repository or [options.build / "repository"]


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set. Further signals do not interrupt the stop."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _write(text: str) -> None:
    """Write to standard output and flush. A closed pipe does not end the server."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
