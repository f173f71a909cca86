"""Passes the metrics page of a node, which its server offers on loopback only, on to holders of a certificate."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import threading
from types import TracebackType
from typing import Self

from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.triton import metrics
from shapeshift.triton.endpoint import Tls

_PATH = "/metrics"
_TIMEOUT_S = 5.0
_MOST_CONNECTIONS = 32


class MetricsProxy:
    """GET /metrics over mutual TLS at host:port is `source`, the page on loopback. A context manager.

    At most 32 connections at once; each ends after 5 s without progress. Raises ShapeshiftError for files of `tls` that
    cannot be used, InvalidInputError for an address that is not available.
    """

    def __init__(self, host: str, port: int, source: str, tls: Tls) -> None:
        context = tls.server_context()
        try:
            self._server = _Server((host, port), _handler(source), context)
        except OSError as error:
            address = f"{host}:{port}"
            raise InvalidInputError("metrics", address, f"the address is not available ({error.strerror})") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler], context: ssl.SSLContext
    ) -> None:
        self._context = context
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        # The handshake belongs to the connection's own thread: a client that sends nothing holds up nobody.
        try:
            request.settimeout(_TIMEOUT_S)
            with contextlib.suppress(OSError):
                secured = self._context.wrap_socket(request, server_side=True)
                super().process_request_thread(secured, client_address)
        finally:
            self._places.release()
            self.shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no event."""


def _handler(source: str) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _TIMEOUT_S

        def do_GET(self) -> None:  # noqa: N802  http.server's name
            if self.path != _PATH:
                self._answer(404, f"there is only {_PATH}\n")
                return
            try:
                self._answer(200, metrics.page(source, _TIMEOUT_S))
            except ShapeshiftError as error:
                self._answer(503, f"{error}\n")

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  http.server's name
            """A scrape a second is not logged."""

    return Handler
