"""The HTTP server: uvicorn, with bounds on connections and on the head of a request."""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shapeshift.gateway.app import make_app
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.settings import GatewaySettings, Limits
from shapeshift.triton.async_client import AsyncClient

MAX_HEAD_BYTES = 64 << 10
"""Of the request line and headers. What came with the end of the request before counts, at most `_PIECE_BYTES`."""
_PIECE_BYTES = 16 << 10
# Seconds that requests in flight get when the server stops, and that a connection without requests stays open.
_GRACE_S, _KEEP_ALIVE_S = 5, 75
# Files beside connections of clients: connections to servers, and those that are being refused.
_OTHER_FILES = 128
_LOG = logging.getLogger("shapeshift.gateway")


def make_server(
    settings: GatewaySettings, clients: Sequence[AsyncClient] = (), limits: Limits | None = None
) -> uvicorn.Server:
    """A server that is not started. Its `run` returns after SIGINT or SIGTERM, or once `should_exit` is set.

    This process may open as many files as `limits` need from then on, as far as the hard limit lets it. clients: as of
    `make_app`.
    """
    limits = limits or Limits()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files, connections = within(soft, hard, limits.max_connections)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    if connections < limits.max_connections:
        _LOG.warning("max_connections: %d, not %d: ulimit -n is %d", connections, limits.max_connections, files)
    config = uvicorn.Config(
        make_app(settings, clients, limits),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=BoundedHttp,
        limit_concurrency=connections,
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return uvicorn.Server(config)


def within(soft: int, hard: int, connections: int) -> tuple[int, int]:
    """The soft limit of open files for so many connections, and how many there may be. soft, hard: as they are now."""
    unlimited = resource.RLIM_INFINITY
    needed = connections + _OTHER_FILES
    if unlimited != soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
    return soft, connections if soft == unlimited else min(connections, max(soft - _OTHER_FILES, soft // 2))


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, with a bound on the head of a request, which has none there. options: of uvicorn."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Bytes of a head that is not complete.
        self._head: int | None = None

    def data_received(self, data: bytes) -> None:
        for first in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[first : first + _PIECE_BYTES]
            super().data_received(piece)
            if self._head is not None:
                self._head += len(piece)
                if self._head > MAX_HEAD_BYTES:
                    self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def _refuse(self) -> None:
        """Close the connection, with an answer unless another one is being sent."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        text = f"headers: got more; at most {MAX_HEAD_BYTES} bytes"
        answer = ApiError(431, text, code="headers_too_large").response()
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
        headers = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
        self.transport.write(head + headers + b"\r\n" + bytes(answer.body))
        self.transport.close()
