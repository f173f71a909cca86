"""`shapeshift reload`: models of a running server are loaded again, with what their files say now."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapeshift.cli.sidecar import ServerAddress, running_at, server_key
from shapeshift.errors import NotFoundError, did_you_mean
from shapeshift.progress import say
from shapeshift.triton import model_config
from shapeshift.triton.endpoint import tls_from_environment

if TYPE_CHECKING:
    from shapeshift.triton.control import ModelControl

_GENERATION = "generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift reload`."""
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--server", metavar="HOST:GRPCPORT", help="gRPC address; default: from the build folder")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Load each model again; what was loaded serves until it is ready. Raises ShapeshiftError for the first failure."""
    # The gRPC client is slow to import.
    from shapeshift.triton.control import ModelControl

    run_directory = options.build / "run"
    server = options.server or (running_at(run_directory) or ServerAddress()).grpc
    with ModelControl(server, server_key(run_directory), tls_from_environment()) as control:
        names = sorted({model.name for model in control.index()})
        for name in options.models:
            if name not in names:
                near = did_you_mean(name, names) or ";"
                raise NotFoundError(f"the server has no model {name}{near} there are: {', '.join(names)}")
        for name in options.models:
            control.load(name, _config(control, name, options.build / "repository" / name / "config.pbtxt"))
            say(f"{name}: loaded again")
    return 0


def _config(control: ModelControl, name: str, file: Path) -> dict[str, Any] | None:
    """What the model's file says, with the next generation: Triton loads nothing again that has not changed.

    None for a model of another repository, which is loaded again where its files have changed.
    """
    if not file.is_file():
        return None
    message = model_config.read(file)
    # Not `is_ready`: from 25.12 on a model whose process has died is not, and would not be loaded again.
    if control.is_loaded(name):
        present = control.parameters(name).get(_GENERATION, "")
        model_config.set_parameter(message, _GENERATION, str(int(present) + 1 if present.isdecimal() else 1))
    return model_config.as_json(message)
