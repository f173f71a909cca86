"""`shapeshift add`: a checkpoint becomes a model of the repository, and of the server if one runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from shapeshift import files
from shapeshift.build_engines.add import NewModel, add
from shapeshift.build_engines.publish import in_one_line
from shapeshift.build_engines.recognition import TECHNIQUES
from shapeshift.cli import engines
from shapeshift.cli.examples import how_to_call
from shapeshift.cli.gateway import port_of
from shapeshift.cli.running.server import running_server
from shapeshift.cli.sidecar import ServerAddress, running_at
from shapeshift.cli.stop_signals import stop_on_sigterm
from shapeshift.errors import ShapeshiftError
from shapeshift.progress import say, warn
from shapeshift.serving.error_codes import code_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift add`."""
    parser.add_argument(
        "checkpoint", metavar="FOLDER_OR_HUB_ID", help="its folder, GGUF or ONNX file, or owner/model on the hub"
    )
    parser.add_argument("--as", dest="name", default="", metavar="NAME", help="the model's name; default: the folder's")
    parser.add_argument("--technique", default="", choices=TECHNIQUES, help="default: as the checkpoint's files say")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"), metavar="DIR")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument(
        "--server", metavar="HOST:GRPCPORT", help="load into this server; default: that of the build folder, if it runs"
    )


def run(options: argparse.Namespace) -> int:
    """Add the model and say what it serves. Returns 2, after one line on standard error, if it is refused."""
    paths = engines.paths_of(options)
    try:
        with stop_on_sigterm("add"), running_server(options.build, options.server) as server:
            taken = {model.name for model in server.index()} if server is not None else set()
            with files.exclusive_lock(paths.build / engines.LOCK, lambda: warn("waiting for another build")):
                new = NewModel(options.checkpoint, options.name, options.technique)
                names = add(new, paths, server, taken, say)
    except Exception as error:  # noqa: BLE001  a library's error, too, is reported in one line
        is_ours = isinstance(error, ShapeshiftError)
        text = str(error) if is_ours else in_one_line(error, paths.build / "add.traceback")
        warn(f"shapeshift add: {code_name(error)}: {options.checkpoint}: {text}")
        return 2
    say(_added(names, options, server is not None))
    return 0


def _added(names: list[str], options: argparse.Namespace, served: bool) -> str:
    listed = " and ".join(str(options.repository / name) for name in names)
    if not served:
        them = "it" if len(names) == 1 else "them"
        build = f"`shapeshift engines {' '.join(names)}` builds {them}"
        # Outside of a checkout there is no Makefile, and `serve` builds nothing.
        serve = f"`make serve` builds and serves {them}, {build}"
        if not Path("Makefile").is_file():
            serve = f"{build}, and `shapeshift serve` serves {them}"
        return f"added {listed}; {serve}"
    at, gateway = running_at(options.build / "run") or ServerAddress(), port_of(options.build / "run")
    repositories = [options.build / "repository"]
    calls = how_to_call(names, repositories, at.host, at.http_port, at.grpc_port, gateway).rstrip()
    return f"added {listed}; the server has loaded it\n{calls}"
