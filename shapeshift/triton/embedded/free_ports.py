"""Ports for servers that share a machine with others."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from shapeshift.triton.settings import ServerSettings

# Below the kernel's own range: no outgoing connection takes a port between its choice and its use.
_RANGE = range(18_000, 32_000)


def free_ports() -> Iterator[int]:
    """Ports of 127.0.0.1 in random order, each once; nothing listens on a port when it is drawn."""
    for port in random.sample(_RANGE, len(_RANGE)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                yield port


def why_taken(host: str, port: int) -> str:
    """Why a server cannot listen on a port, such as `Address already in use`; empty where it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Servers set this option, too: connections in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def on_free_ports(settings: ServerSettings, ports: Iterable[int] | None = None) -> ServerSettings:
    """`settings` on three of `ports`, or on any free ports."""
    http, grpc, metrics = islice(ports or free_ports(), 3)
    return replace(settings, http_port=http, grpc_port=grpc, metrics_port=metrics)
