"""Fleet files of tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from shapeshift.files import replace_text
from shapeshift.fleet import settings
from shapeshift.fleet.node import Node
from shapeshift.triton.endpoint import Endpoint


class Server(Protocol):
    """Where a server listens."""

    @property
    def grpc_url(self) -> str: ...

    @property
    def metrics_url(self) -> str: ...


def write_servers(file: Path, servers: Mapping[str, Server], keys: Mapping[str, Path] | None = None) -> None:
    """Let these servers be the nodes of the fleet `test`. keys: by node, the file of its control key."""
    write(file, {name: (one.grpc_url, one.metrics_url) for name, one in servers.items()}, keys)


def write(file: Path, nodes: Mapping[str, tuple[str, str]], keys: Mapping[str, Path] | None = None) -> None:
    """Write a fleet file in one step. nodes: by name, HOST:PORT of gRPC and the URL of the metrics page."""
    found = [Node(name, Endpoint(grpc), page, (keys or {}).get(name)) for name, (grpc, page) in nodes.items()]
    replace_text(file, settings.text("test", None, found))
