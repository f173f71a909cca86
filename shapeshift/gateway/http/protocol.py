"""HTTP connections with bounds: on their number, on the head of a request, and on a client that does not read."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.settings import GatewaySettings

MAX_HEAD_BYTES = 64 << 10
"""Of the request line and headers. What came with the end of the request before counts, at most `_PIECE_BYTES`."""
_PIECE_BYTES = 16 << 10


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, which waits for ever: for the end of a head, and for a client to read its answer.

    given: the arguments of uvicorn.
    """

    def __init__(self, settings: GatewaySettings, **given: Any) -> None:
        super().__init__(**given)
        self._settings = settings
        # Bytes of a head that is not complete.
        self._head: int | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Any byte that the client leaves unread starts the timer, also below the usual 64 KiB.
        transport.set_write_buffer_limits(0)
        full = len(self.connections) >= self._settings.max_connections
        super().connection_made(transport)
        if full:
            text = f"max_connections: {self._settings.max_connections} connections are open; retry later"
            self._refuse(ApiError(429, text, "rate_limit_error", code="overloaded", headers={"retry-after": "1"}))
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
            self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self.transport.close)

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

        self._stall_timer = self.loop.call_later(self._settings.stall_timeout_s, check)

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with this answer unless another one is being sent."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = orjson.dumps(error.body())
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *(f"{name}: {value}" for name, value in headers.items()),
            "\r\n",
        ]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()
