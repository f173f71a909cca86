"""The TCP proxy that disturbs the link between two nodes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from bench.fleet.tcp_proxy import TcpProxy


@pytest.fixture
def echo() -> Iterator[str]:
    """The address of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection:
                try:
                    while data := connection.recv(4096):
                        connection.sendall(data)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def connect(proxy: TcpProxy) -> socket.socket:
    host, _, port = proxy.address.partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_it_passes_delays_holds_and_resets(echo: str) -> None:
    with TcpProxy(echo) as proxy:
        with connect(proxy) as link:
            link.sendall(b"one")
            assert link.recv(9) == b"one"
            proxy.delay_s = 0.1
            before = time.monotonic()
            link.sendall(b"two")
            assert link.recv(9) == b"two" and time.monotonic() - before >= 0.2
            proxy.delay_s = 0.0
            proxy.cut = True
            link.sendall(b"three")
            link.settimeout(0.2)
            with pytest.raises(TimeoutError):
                link.recv(9)
            proxy.cut = False
            link.settimeout(10)
            assert link.recv(9) == b"three"
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                link.recv(9)
        with connect(proxy) as link:
            link.sendall(b"again")
            assert link.recv(9) == b"again"
    with pytest.raises(OSError, match="refused"):
        connect(proxy)
