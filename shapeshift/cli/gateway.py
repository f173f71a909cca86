"""`shapeshift gateway`: the OpenAI, rerank and TEI APIs in front of servers with our backends."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import socket
import sys
import threading
import time
from pathlib import Path

from shapeshift import process_log
from shapeshift.child_process import ChildProcess, add_until_eof, at_end_of_input
from shapeshift.cli.sidecar import running_at
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.gateway.settings import GatewaySettings
from shapeshift.triton.embedded.free_ports import why_taken
from shapeshift.triton.settings import ServerSettings

DEFAULT_PORT = GatewaySettings.port
LOG_FILE = "gateway.log"
_PORT_FILE = "gateway.port"
_HOST = GatewaySettings.host
_START_S, _POLL_S = 15.0, 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift gateway`; the defaults are those of GatewaySettings."""
    defaults = GatewaySettings
    parser.add_argument(
        "--triton",
        action="append",
        metavar="HOST:GRPCPORT",
        help="a server; repeatable; default: from the build folder",
    )
    parser.add_argument("--metrics", action="append", metavar="URL", help="a metrics page to pass on; repeatable")
    parser.add_argument("--host", default=_HOST, help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on (%(default)s)")
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="ask for a key of this file")
    parser.add_argument("--new-key", metavar="NAME", help="add a key to the file of --api-keys, print it, and exit")
    parser.add_argument(
        "--cors-origin", action="append", metavar="ORIGIN", help="let this origin's pages ask; repeatable; * for all"
    )
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--adapter-root", type=Path, metavar="DIR", help="let requests add adapters that lie under DIR")
    parser.add_argument(
        "--max-requests", type=int, default=defaults.max_requests, help="most requests in flight (%(default)s)"
    )
    parser.add_argument(
        "--request-timeout", type=float, default=defaults.request_timeout_s, metavar="SECONDS", help="most time for one"
    )
    for what in ("requests", "tokens"):
        about = f"most {what} of a key whose line states no limit"
        parser.add_argument(f"--{what}-per-minute", type=int, metavar="N", help=about)
    process_log.add_option(parser)
    add_until_eof(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal stops it, and return 0. Raises ShapeshiftError."""
    if options.new_key is not None:
        return _new_key(options)
    try:
        from shapeshift.gateway.http.server import make_server
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed: pip install 'shapeshift[gateway]'") from None
    settings = settings_of(options)
    process_log.set_up(options.log, sys.stdout)
    server = make_server(settings)
    if options.until_eof:
        at_end_of_input(lambda: setattr(server, "should_exit", True))
    about = f"http://{settings.host}:{settings.port}, asks {', '.join(settings.triton)}"
    logging.getLogger("shapeshift.gateway").info("gateway: %s", about)
    server.run()
    return 0 if server.started else 1


class GatewayProcess(ChildProcess):
    """`shapeshift gateway` on `port` of the loopback address, for a server of this machine."""

    def __init__(self, settings: ServerSettings, port: int, log: str = "") -> None:
        self.port = port
        options = {
            "--triton": settings.grpc_url,
            "--metrics": settings.metrics_url,
            "--build": settings.run_directory.parent,
            "--port": port,
            "--log": log,
        }
        arguments = [f"{name}={value}" for name, value in options.items()]
        super().__init__("gateway", arguments, settings.run_directory / LOG_FILE, settings.shared_variables)

    def await_listening(self, stop: threading.Event) -> bool:
        """Wait until it takes connections, at most 15 s; false where it does not by then, or `stop` is set before."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex((_HOST, self.port)) == 0:
                    return True
            if stop.wait(_POLL_S):
                return False
        return False


def child(settings: ServerSettings, port: int, log: str = "") -> GatewayProcess:
    """The gateway of the server with these settings, not started yet. log: the value of its `--log`.

    Raises UnsupportedError where its packages are not installed or the port is not available.
    """
    if importlib.util.find_spec("fastapi") is None:
        raise UnsupportedError("fastapi is not installed: pip install 'shapeshift[gateway]'")
    if reason := why_taken(_HOST, port):
        raise UnsupportedError(f"{_HOST}:{port} is not available ({reason}): choose another --gateway-port")
    settings.run_directory.mkdir(parents=True, exist_ok=True)
    (settings.run_directory / _PORT_FILE).write_text(f"{port}\n")
    return GatewayProcess(settings, port, log)


def port_of(run_directory: Path) -> int:
    """The port of the gateway that runs, or last ran, in this run directory; the default where none has run."""
    try:
        return int((run_directory / _PORT_FILE).read_text())
    except (OSError, ValueError):
        return DEFAULT_PORT


def _new_key(options: argparse.Namespace) -> int:
    from shapeshift.gateway.http import api_keys

    if options.api_keys is None:
        raise InvalidInputError("--api-keys", None, "the file that the key is added to")
    sys.stdout.write(f"{api_keys.add(options.api_keys, options.new_key)}\n")
    return 0


def settings_of(options: argparse.Namespace) -> GatewaySettings:
    """What the options say; without --triton, the servers of the build folder."""
    running = running_at(options.build / "run") if options.triton is None else None
    return GatewaySettings(
        triton=tuple(options.triton or ([running.grpc] if running else GatewaySettings.triton)),
        metrics=tuple(options.metrics or ([running.metrics] if running else [])),
        host=options.host,
        port=options.port,
        api_keys=options.api_keys,
        cors_origins=tuple(options.cors_origin or ()),
        build=options.build,
        adapter_root=options.adapter_root,
        max_requests=options.max_requests,
        request_timeout_s=options.request_timeout,
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
    )
