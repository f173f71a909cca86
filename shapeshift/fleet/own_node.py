"""The node of a fleet that this machine starts: its server's settings, its metrics page for others, its drain."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError, did_you_mean
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.metrics_proxy import MetricsProxy
from shapeshift.fleet.node import Node
from shapeshift.serving.model_args import FLEET_FILE_VARIABLE, NODE_VARIABLE
from shapeshift.settings import require
from shapeshift.triton import metrics
from shapeshift.triton.endpoint import bracketed
from shapeshift.triton.metrics import Samples
from shapeshift.triton.settings import ServerSettings

_IN_FLIGHT = ("shapeshift_requests_waiting", "shapeshift_requests_running", "nv_inference_pending_request_count")
# Pages without a request in flight before the server may stop: what a process counts is up to a second old.
_IDLE_PAGES = 3


class OwnNode:
    """The node called `name` of the fleet file `file`. Raises as `settings.read` does, NotFoundError for another name.

    drain_s: most seconds that `drain` waits; scrape_s: between two of its looks.
    """

    def __init__(self, file: Path, name: str, drain_s: float = 60.0, scrape_s: float = 1.0) -> None:
        require(0 <= drain_s <= 3600, "drain", drain_s, "must be 0 to 3600 seconds")
        fleet = fleet_settings.read(file, name)
        self.name = name
        self._file = file.resolve()
        self._node = _find(fleet.nodes, name, file)
        self._tls = fleet.tls
        self._drain_s = drain_s
        self._scrape_s = scrape_s

    def server_settings(self, base: ServerSettings) -> ServerSettings:
        """`base` with the node's gRPC address, certificates, key and fleet. HTTP and metrics stay on loopback.

        Raises InvalidInputError for an address that is none of this machine, NotFoundError for a missing certificate.
        """
        if self._tls is not None:
            self._tls.require_files()
        host, port = _address(self._node.grpc.address, "grpc")
        return replace(
            base,
            grpc_host=bracketed(host),
            grpc_port=port,
            tls=self._tls,
            control_key=self._node.key_file or base.control_key,
            variables={**base.variables, FLEET_FILE_VARIABLE: str(self._file), NODE_VARIABLE: self.name},
            # Without TLS there is no proxy: the server's own page is the node's.
            metrics_port=base.metrics_port if self._tls is not None else self._page_address()[1],
        )

    def metrics_page(self, source: str) -> contextlib.AbstractContextManager[object]:
        """Within the block, other nodes read `source`, the page on loopback, at the address of the fleet file.

        Raises InvalidInputError for an address that is not available.
        """
        if self._tls is None:
            return contextlib.nullcontext()
        return MetricsProxy(*self._page_address(), source, self._node.grpc, self._tls)

    def drain(self, page: str, say: Callable[[str], None]) -> None:
        """Wait until the server with the metrics page `page` has no request in flight, at most `drain_s` seconds.

        Who drains a node first takes it out of the fleet file, so that nobody sends it more.
        """
        await_idle(page, self._drain_s, say, self._scrape_s)

    def _page_address(self) -> tuple[str, int]:
        parts = urlsplit(self._node.metrics)
        secured = self._tls is not None
        require(
            (parts.scheme == "https") == secured, "metrics", self._node.metrics, "https:// with [tls], else http://"
        )
        host, port = _address(parts.netloc, "metrics")
        require(secured or host.startswith("127."), "metrics", self._node.metrics, "other machines need [tls]")
        return host, port


def await_idle(page: str, limit_s: float, say: Callable[[str], None], scrape_s: float = 1.0) -> None:
    """Wait until the server with the metrics page `page` has no request in flight, or is gone, at most `limit_s`."""
    deadline, idle, requests = time.monotonic() + limit_s, 0, 0.0
    # A process that has ended may have left requests that nobody answers.
    pause, reader = threading.Event(), metrics.LiveReader(page)
    while idle < _IDLE_PAGES and time.monotonic() < deadline:
        try:
            requests = in_flight(reader.read())
        except ShapeshiftError:
            return
        idle = 0 if requests else idle + 1
        pause.wait(scrape_s)
    if idle < _IDLE_PAGES and requests:
        say(f"{requests:g} requests are still in flight after {limit_s:g} s\n")


def in_flight(samples: Samples) -> float:
    """Requests that the models of a page hold, whether they wait or are computed."""
    return sum(value for (name, _), value in samples.items() if name in _IN_FLIGHT)


def _find(nodes: tuple[Node, ...], name: str, file: Path) -> Node:
    for node in nodes:
        if node.name == name:
            return node
    names = [node.name for node in nodes]
    near = did_you_mean(name, names) or ";"
    raise NotFoundError(f"{file} has no node {name}{near} it has {', '.join(names) or 'none'}")


def _address(address: str, field: str) -> tuple[str, int]:
    """Host, as an IP address (IPv6 where there is no other), and port. Raises InvalidInputError for an unknown host."""
    host, _, port = address.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        raise InvalidInputError(field, address, "must be HOST:PORT, a host of this machine") from None
    sockaddr = min(infos, key=lambda info: info[0] != socket.AF_INET)[4]
    return str(sockaddr[0]), int(sockaddr[1])
