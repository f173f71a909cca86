"""`shapeshift fleet status`: what the nodes of a fleet serve now."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.fleet.node import Node
from shapeshift.triton.keys import read_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift fleet status`."""
    parser.add_argument("file", type=Path, help="the fleet file")


def run(options: argparse.Namespace) -> int:
    """Write one line for each node to standard output. Raises ShapeshiftError for an invalid fleet file."""
    found = settings.read(options.file)
    for node in found.nodes:
        sys.stdout.write(f"{node.name}  {node.grpc.address}  {_state(node)}\n")
    return 0


def _state(node: Node) -> str:
    # The gRPC client is slow to import.
    from shapeshift.triton.control import ModelControl

    try:
        with ModelControl(node.grpc.address, read_key(node.key_file) if node.key_file else "") as control:
            ready = sum(model.state == "READY" for model in control.index())
            return f"Triton {control.version()}, {ready} models"
    except ShapeshiftError as error:
        return str(error)
