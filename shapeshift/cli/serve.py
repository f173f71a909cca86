"""`shapeshift serve`: start server and sidecar, say what is served, stop on Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from shapeshift import installation, process_log, progress
from shapeshift.child_process import command_line, environment
from shapeshift.cli import engines
from shapeshift.cli.gateway import DEFAULT_PORT, child
from shapeshift.cli.running import memory
from shapeshift.cli.served_models import models_to_load, without_misfits
from shapeshift.cli.sidecar import SidecarProcess
from shapeshift.cli.stop_signals import stop_event
from shapeshift.cli.supervisor import FleetNode, Say, Supervisor
from shapeshift.errors import InvalidInputError
from shapeshift.settings import require
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.embedded.free_ports import on_free_ports
from shapeshift.triton.embedded.server import ServerEndedError, TritonServer
from shapeshift.triton.settings import ServerSettings

DEFAULT_BUILD = Path("build")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift serve`; the defaults of the server are those of ServerSettings."""
    parser.add_argument("--models", metavar="NAME,...", help="models to load; default: all of the repository")
    parser.add_argument(
        "--engines",
        action="store_true",
        help="build what is not current of model_repository/ beside the server, which loads each model once it is done",
    )
    parser.add_argument("--repository", type=Path, action="append", metavar="DIR", help="folder of models; repeatable")
    parser.add_argument("--backends", type=Path, action="append", metavar="DIR", help="folder of backends; repeatable")
    for name in ("http", "grpc", "metrics"):
        default = getattr(ServerSettings, f"{name}_port")
        parser.add_argument(
            f"--{name}-port", type=int, metavar="PORT", help=f"default: {default}, with --fleet a free one"
        )
    parser.add_argument("--host", default=ServerSettings.host, help="address to bind to (%(default)s)")
    parser.add_argument("--build", type=Path, default=DEFAULT_BUILD, help="folder of generated files (%(default)s)")
    parser.add_argument("--triton", type=Path, metavar="DIR", help="use another server than that of the build folder")
    parser.add_argument("--print-models", action="store_true", help="print the models to load, one a line, and exit")
    parser.add_argument(
        "--ready-timeout", type=float, default=1800.0, metavar="SECONDS", help="time to load everything"
    )
    parser.add_argument("--no-restart", action="store_true", help="end when the server ends by itself")
    parser.add_argument("--strict", action="store_true", help="do not start if a model cannot be served")
    parser.add_argument("--no-sidecar", action="store_true", help="start no sidecar")
    parser.add_argument("--no-gateway", action="store_true", help="start no gateway")
    parser.add_argument(
        "--gateway-port",
        type=int,
        metavar="PORT",
        help=f"of the gateway ({DEFAULT_PORT}); with --fleet there is a gateway where this is given",
    )
    process_log.add_option(parser)
    parser.add_argument("--traces", default="", metavar="URL", help="send traces there, by OTLP over HTTP")
    rate = ServerSettings.trace_rate
    parser.add_argument(
        "--trace-rate", type=int, default=rate, metavar="N", help="with --traces: one request in so many (%(default)s)"
    )
    parser.add_argument(
        "--plan-period", type=float, default=SidecarSettings.plan_period_s, metavar="SECONDS", help="the sidecar's"
    )

    parser.add_argument("--fleet", type=Path, metavar="FILE", help="serve as a node of the fleet in this file")
    parser.add_argument("--node", metavar="NAME", help="with --fleet: the name of the node")
    parser.add_argument(
        "--drain", type=float, default=60.0, metavar="SECONDS", help="with --fleet: most time to end requests at a stop"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal stops it and return 0.

    Returns 1 if the server ended by itself and is not restarted. Raises ShapeshiftError.
    """
    if options.print_models:
        _write("".join(f"{name}\n" for name in models_to_load(options, _repositories(options))))
        return 0
    if process_log.is_json(options.log):
        process_log.set_up(options.log, sys.stdout)
    try:
        return _embedded(options)
    except ServerEndedError as error:
        sys.stderr.write(f"shapeshift serve: {error}\n")
        return 1


def _embedded(options: argparse.Namespace) -> int:
    repositories = _repositories(options)
    builder, built = _builder(options) if options.engines else (None, ())
    models = [] if builder is not None else _models_that_fit(options, repositories)
    node = _node(options)
    # The nodes of one machine share the build folder.
    own_build = options.build if node is None else options.build / "nodes" / node.name
    settings = ServerSettings(
        repositories=tuple(repositories),
        models=tuple(models),
        backend_directories=tuple(options.backends or [installation.BACKENDS]),
        triton=options.triton or options.build / "triton",
        run_directory=own_build / "run",
        host=options.host,
        # `shapeshift engines` has completed the configurations of the generated repository.
        complete_configs=bool(options.repository),
        keep_going=not options.strict,
        traces=options.traces,
        trace_rate=options.trace_rate,
    )
    if node is not None:
        settings = node.server_settings(on_free_ports(settings))
    ports = {f"{name}_port": getattr(options, f"{name}_port") for name in settings.ports}
    settings = replace(settings, **{name: port for name, port in ports.items() if port is not None})
    SidecarSettings(plan_period_s=options.plan_period)
    gateway_port = _gateway_port(options)
    with stop_event() as stop:
        supervisor = Supervisor(
            settings,
            TritonServer,
            lambda: _models_that_fit(options, repositories),
            options.ready_timeout,
            not options.no_restart,
            f"{_examples(options)}\n{_live(own_build)}\n\nCtrl-C stops the server\n",
            _speaker(options),
            None
            if options.no_sidecar or node is not None
            else partial(SidecarProcess, plan_period_s=options.plan_period, log=options.log),
            None if gateway_port is None else partial(child, port=gateway_port, log=options.log),
            builder,
            built,
            node,
        )
        return supervisor.run(stop)


def _models_that_fit(options: argparse.Namespace, repositories: Sequence[Path]) -> list[str]:
    """The models to load, by the memory plan, which is written. Raises as `models_to_load` and `without_misfits`."""
    models = models_to_load(options, repositories)
    lines, refused = memory.plan(repositories, models)
    _speaker(options)(lines)
    return without_misfits(models, refused, repositories, options.strict)


def _builder(options: argparse.Namespace) -> tuple[Callable[[], subprocess.Popen[bytes]], Collection[str]]:
    """What starts `shapeshift engines`, which loads what it builds, and the models that are to be built.

    Raises NotFoundError for a model that is not there.
    """
    # It knows the techniques.
    from shapeshift.build_engines.repository import front_folders

    for name in ("fleet", "repository", "strict"):
        value = getattr(options, name)
        require(not value, f"--{name}", value, "does not go with --engines: run `shapeshift engines` before")
    models = [name.strip() for name in (options.models or "").split(",") if name.strip()]
    arguments = argparse.Namespace(repository=engines.MODEL_REPOSITORY, build=options.build)
    folders = front_folders(engines.paths_of(arguments), {*models})
    (options.build / "repository").mkdir(parents=True, exist_ok=True)
    command = command_line("engines", [*models, "--load", "--keep-going", "--brief", "--build", str(options.build)])

    def start() -> subprocess.Popen[bytes]:
        # Ctrl-C in a terminal reaches only this process, which then stops the other one.
        return subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, start_new_session=True)

    return start, [folder.name for folder in folders]


def _node(options: argparse.Namespace) -> FleetNode | None:
    """The node that the options name. Raises InvalidInputError for one of --fleet and --node without the other."""
    if options.fleet is None and options.node is None:
        return None
    if options.fleet is None or options.node is None:
        missing = "--fleet" if options.fleet is None else "--node"
        raise InvalidInputError(missing, None, "--fleet FILE and --node NAME go together")
    # By name: without a fleet nothing of it is imported.
    own_node = importlib.import_module("shapeshift.fleet.own_node")
    return cast(FleetNode, own_node.OwnNode(options.fleet, options.node, options.drain))


def _gateway_port(options: argparse.Namespace) -> int | None:
    if options.no_gateway:
        return None
    default = DEFAULT_PORT if options.fleet is None else None
    return default if options.gateway_port is None else int(options.gateway_port)


def _program() -> str:
    return sys.argv[0] if Path(sys.argv[0]).name == "shapeshift" else "shapeshift"


def _live(build: Path) -> str:
    """The line with the command that serves the live page of the server of this build folder; it can be copied."""
    arguments = [] if build == DEFAULT_BUILD else ["--build", str(build)]
    return f"see them work: {shlex.join([_program(), 'live', *arguments])}"


def _examples(options: argparse.Namespace) -> str:
    """The line with the command that prints the calls; it can be copied, and options can follow."""
    arguments = [] if options.build == DEFAULT_BUILD else ["--build", str(options.build)]
    for folder in options.repository or []:
        arguments += ["--repository", str(folder)]
    return f"how to call them: {shlex.join([_program(), 'examples', *arguments])}"


def _repositories(options: argparse.Namespace) -> list[Path]:
    return options.repository or [options.build / "repository"]


def _speaker(options: argparse.Namespace) -> Say:
    return _say_json if process_log.is_json(options.log) else _say


def _say(text: str, level: int = logging.INFO) -> None:
    """Write to standard output, without the level."""
    _write(text)


def _say_json(text: str, level: int = logging.INFO) -> None:
    for line in filter(None, map(str.strip, text.splitlines())):
        logging.getLogger("shapeshift.serve").log(level, line)


def _write(text: str) -> None:
    """Write to standard output and flush. A closed pipe does not end the server."""
    try:
        if text:
            progress.clear()
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
