"""The HTTP server: uvicorn, with bounds on connections, on the head of a request, and on clients that do not read."""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shapeshift.gateway.app import make_app
from shapeshift.gateway.errors import ApiError, overloaded
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
    limits = replace(limits, max_connections=connections)
    protocol: Any = functools.partial(BoundedHttp, limits)
    config = uvicorn.Config(
        make_app(settings, clients, limits),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol,
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
    """uvicorn's protocol, which waits for ever: for the end of a head, and for a client to read its answer.

    options: the arguments of uvicorn.
    """

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        # Bytes of a head that is not complete.
        self._head: int | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Any byte that the client leaves unread starts the timer, also below the usual 64 KiB.
        transport.set_write_buffer_limits(0)
        full = len(self.connections) >= self._limits.max_connections
        super().connection_made(transport)
        if full:
            text = f"max_connections: {self._limits.max_connections} connections are open; retry later"
            self._refuse(overloaded(text))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        for first in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[first : first + _PIECE_BYTES]
            super().data_received(piece)
            if self._head is not None:
                self._head += len(piece)
                if self._head > MAX_HEAD_BYTES:
                    text = f"headers: got more; at most {MAX_HEAD_BYTES} bytes"
                    self._refuse(ApiError(431, text, code="headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head = None
        self._end_wait()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def _await_head(self) -> None:
        if self._head_timer is None:
            # Where something is left to be sent, closing waits for `_watch_reader`.
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self.transport.close)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self, unsent: int) -> None:
        """End the connection unless less than `unsent` bytes are left after the stall timeout, again and again."""

        def check() -> None:
            left = self.transport.get_write_buffer_size()
            if left < unsent:
                self._watch_reader(left)
            else:
                self.transport.abort()

        self._stall_timer = self.loop.call_later(self._limits.stall_timeout_s, check)

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with this answer unless another one is being sent."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        answer = error.response()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n".encode()
        headers = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
        self.transport.write(head + headers + b"\r\n" + bytes(answer.body))
        self.transport.close()
