"""Passes the metrics page of a node, which its server offers on loopback only, on to holders of a certificate."""

from __future__ import annotations

import contextlib
import http.server
import math
import socket
import ssl
import threading
import time
from typing import Any, Self

from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.triton import metrics
from shapeshift.triton.endpoint import Endpoint, Tls, bracketed

CERTIFICATE_EXPIRY = "shapeshift_certificate_expiry_timestamp_seconds"
_PATH = "/metrics"
_TIMEOUT_S = 5.0
_MOST_CONNECTIONS = 32
_EXPIRY_PERIOD_S = 60.0


class MetricsProxy(http.server.ThreadingHTTPServer):
    """GET /metrics over mutual TLS at host:port is `source`, the page on loopback. A context manager.

    The page also says when the certificate ends that the gRPC server at `grpc` shows: it reads its files at its start
    only. This page reads them when they are replaced. At most 32 connections at once: one more ends the oldest; each
    ends after 5 s without progress. Raises ShapeshiftError for files of `tls` that cannot be used, InvalidInputError
    for an address that is not available.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, source: str, grpc: Endpoint, tls: Tls) -> None:
        self._source = source
        self._grpc = grpc
        self._tls = tls
        self._stamp, self._context = tls.stamp(), tls.server_context()
        self._expiry = ""
        self._asked_at = -math.inf
        self._lock = threading.Lock()
        # In the order in which they came.
        self._connections: dict[socket.socket, None] = {}
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            address = f"{bracketed(host)}:{port}"
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
        # While files are being replaced they may not fit each other.
        with contextlib.suppress(ShapeshiftError):
            if (stamp := self._tls.stamp()) != self._stamp:
                self._context, self._stamp = self._tls.server_context(), stamp
        # The handshake comes with the first read, on the connection's own thread: who sends nothing holds up nobody.
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = None
            if len(self._connections) > _MOST_CONNECTIONS:
                # Its thread ends with its next read.
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections.pop(request, None)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away, or has no certificate, is no event."""

    def page(self) -> str:
        """The server's page, and when its certificate ends. Raises ShapeshiftError."""
        text = metrics.page(self._source, _TIMEOUT_S)
        if time.monotonic() - self._asked_at > _EXPIRY_PERIOD_S:
            self._asked_at = time.monotonic()
            self._expiry = self._expiry_line()
        return text + self._expiry

    def _expiry_line(self) -> str:
        host, port = self._grpc.host, self._grpc.address.rpartition(":")[2]
        with contextlib.suppress(OSError, ShapeshiftError, KeyError):
            with (
                socket.create_connection((host, int(port)), _TIMEOUT_S) as plain,
                self._tls.client_context().wrap_socket(plain, server_hostname=host) as connection,
            ):
                ends = ssl.cert_time_to_seconds(str((connection.getpeercert() or {})["notAfter"]))
            return f"# TYPE {CERTIFICATE_EXPIRY} gauge\n{CERTIFICATE_EXPIRY} {ends}\n"
        return ""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MetricsProxy

    def do_GET(self) -> None:  # noqa: N802  http.server's name
        if self.path != _PATH:
            self._answer(404, f"there is only {_PATH}\n")
            return
        try:
            self._answer(200, self.server.page())
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
