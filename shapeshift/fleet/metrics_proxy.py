"""Passes the metrics page of a node, which its server offers on loopback only, on to holders of a certificate."""

from __future__ import annotations

import http.server
import socket
import threading
from typing import Any, Self

from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.triton import metrics
from shapeshift.triton.endpoint import Tls

_PATH = "/metrics"
_TIMEOUT_S = 5.0
_MOST_CONNECTIONS = 32


class MetricsProxy(http.server.ThreadingHTTPServer):
    """GET /metrics over mutual TLS at host:port is `source`, the page on loopback. A context manager.

    At most 32 connections at once; each ends after 5 s without progress. Raises ShapeshiftError for files of `tls` that
    cannot be used, InvalidInputError for an address that is not available.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, source: str, tls: Tls) -> None:
        self.source = source
        self._context = tls.server_context()
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            address = f"{host}:{port}"
            raise InvalidInputError("metrics", address, f"the address is not available ({error.strerror})") from None

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="metrics-proxy", daemon=True).start()
        return self

    def __exit__(self, *ended: object) -> None:
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.settimeout(_TIMEOUT_S)
        # The handshake comes with the first read, on the connection's own thread: who sends nothing holds up nobody.
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away, or has no certificate, is no event."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MetricsProxy

    def do_GET(self) -> None:  # noqa: N802  http.server's name
        if self.path != _PATH:
            self._answer(404, f"there is only {_PATH}\n")
            return
        try:
            self._answer(200, metrics.page(self.server.source, _TIMEOUT_S))
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
