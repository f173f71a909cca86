"""`shapeshift examples`: how to call the models, with the addresses of the server of the build folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shapeshift.build_engines.model_folder import HOW_TO_CALL, SUMMARY
from shapeshift.cli.gateway import DEFAULT_PORT, port_of
from shapeshift.cli.sidecar import ServerAddress, running_at
from shapeshift.errors import NotFoundError
from shapeshift.sidecar import run_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift examples`."""
    parser.add_argument("models", nargs="*", metavar="NAME", help="only these models (default: all)")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--repository", type=Path, action="append", metavar="DIR", help="folder of models; repeatable")
    parser.add_argument("--host", help="of the server; default: from the build folder")
    parser.add_argument("--http-port", type=int, help="default: from the build folder")
    parser.add_argument("--grpc-port", type=int, help="default: from the build folder")


def run(options: argparse.Namespace) -> int:
    """Write how to call each model to standard output. Raises NotFoundError for a model that no repository has."""
    repositories = options.repository or [options.build / "repository"]
    available = sorted(run_files.repository_models(repositories)[0])
    if not available:
        places = ", ".join(map(str, repositories))
        raise NotFoundError(f"no models in {places}; run `shapeshift engines`, or name its folder with --build")
    for name in options.models:
        if name not in available:
            raise NotFoundError(f"no model {name} in the repositories; they have: {', '.join(available)}")
    at = running_at(options.build / "run") or ServerAddress()
    http_port, grpc_port = options.http_port or at.http_port, options.grpc_port or at.grpc_port
    models = options.models or available
    gateway_port = port_of(options.build / "run")
    sys.stdout.write(how_to_call(models, repositories, options.host or at.host, http_port, grpc_port, gateway_port))
    return 0


def how_to_call(
    models: Sequence[str],
    repositories: Sequence[Path],
    host: str,
    http_port: int,
    grpc_port: int,
    gateway_port: int = DEFAULT_PORT,
) -> str:
    """How to call each model, below its line of `summaries`: its how_to_call.txt with the placeholders filled in."""
    values = {"{host}": host, "{http_port}": str(http_port), "{grpc_port}": str(grpc_port)}
    values["{gateway_port}"] = str(gateway_port)
    parts = []
    for model in models:
        text = (
            _read(model, repositories, HOW_TO_CALL) or f"curl -i http://{{host}}:{{http_port}}/v2/models/{model}/ready"
        )
        for name, value in values.items():
            text = text.replace(name, value)
        parts.append(f"{summaries([model], repositories)}{text}\n")
    return "\n".join(parts)


def summaries(models: Sequence[str], repositories: Sequence[Path]) -> str:
    """One line a model: its name, and what `shapeshift engines` noted of it (provider, precision, checkpoint)."""
    width = max(map(len, models), default=0)
    return "".join(f"{name:{width}}  {_read(name, repositories, SUMMARY)}".rstrip() + "\n" for name in models)


def _read(model: str, repositories: Sequence[Path], name: str) -> str:
    files = [folder / model / name for folder in repositories]
    return next((file.read_text(encoding="utf-8").rstrip() for file in files if file.is_file()), "")
