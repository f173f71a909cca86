"""`shapeshift live`: a page that shows what the techniques do on a running server."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shapeshift.cli.sidecar import ServerAddress, running_at, server_key
from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.progress import say
from shapeshift.triton.settings import is_loopback

DEFAULT_PORT = 8090


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift live`."""
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Serve the page until a signal stops it, and return 0. Raises ShapeshiftError."""
    try:
        from shapeshift.live.access import KEY_VARIABLE
        from shapeshift.live.app import is_watched, make_server
        from shapeshift.live.source import Addresses, Source
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed: pip install 'shapeshift[live]'") from None
    key = os.environ.get(KEY_VARIABLE, "")
    if not key and not is_loopback(options.host):
        raise InvalidInputError("--host", options.host, f"127.0.0.1, unless {KEY_VARIABLE} names the page's key")
    run_directory = options.build / "run"

    def find() -> Addresses:
        at = running_at(run_directory) or ServerAddress()
        http = f"{at.host}:{at.http_port}"
        return Addresses(at.grpc, http, at.metrics, server_key(run_directory), run_directory)

    say(f"live page: http://{options.host}:{options.port}/, about the server of {run_directory}")
    server = make_server(Source(find, is_watched), options.host, options.port, key)
    server.run()
    return 0 if server.started else 1
