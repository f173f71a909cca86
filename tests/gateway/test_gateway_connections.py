"""Clients that send no end of their headers, or open many connections."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shapeshift.gateway.http import api_keys
from shapeshift.gateway.http.server import within
from tests.gateway.conftest import HTTP
from tests.gateway.fake_triton import FakeTriton
from tests.waiting import wait_for

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\n"


def connect(url: str) -> socket.socket:
    host, port = urlsplit(url).netloc.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def rest(connection: socket.socket) -> bytes:
    """What comes until the gateway closes the connection."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("line", [b"A: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_headers_are_bounded(url: str, line: bytes) -> None:
    with connect(url) as connection:
        connection.sendall(HEAD + b"A: ")
        try:
            for _ in range(200):
                connection.sendall(line)
        except ConnectionError:
            pass
        found = rest(connection)
    # The answer may be lost with what the gateway has not read.
    assert found == b"" or (b"HTTP/1.1 431" in found and b"headers_too_large" in found)
    assert HTTP.get(f"{url}/health", headers={"A": "a" * 40_000}).status_code == 200


def test_connections_are_bounded(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton(), max_connections=3)
    with connect(url) as one, connect(url) as two, connect(url) as three:
        three.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert three.recv(100).startswith(b"HTTP/1.1 503")
        one.close()
        two.close()
    wait_for(lambda: HTTP.get(f"{url}/health").status_code == 200)


@pytest.mark.parametrize(
    ("now", "soft", "connections"),
    [
        ((1024, 1 << 20), 8192 + 128, 8192),
        ((1024, 4096), 4096, 4096 - 128),
        ((100, 100), 100, 50),
        ((1 << 20, 1 << 20), 1 << 20, 8192),
        ((1024, resource.RLIM_INFINITY), 8192 + 128, 8192),
        ((resource.RLIM_INFINITY,) * 2, resource.RLIM_INFINITY, 8192),
    ],
)
def test_connections_fit_the_open_files(now: tuple[int, int], soft: int, connections: int) -> None:
    assert within(*now, 8192) == (soft, connections)


@pytest.mark.parametrize("origin", ["https://page.example", "*"])
def test_pages_of_an_origin_may_ask(start_gateway: Callable[..., str], tmp_path: Path, origin: str) -> None:
    key = api_keys.add(tmp_path / "keys", "ana")
    url = start_gateway(FakeTriton(), cors_origins=(origin,), api_keys=tmp_path / "keys")
    page = {"Origin": "https://page.example"}
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = HTTP.options(f"{url}/v1/embeddings", headers={**page, **ask})
    allowed = preflight.headers["access-control-allow-headers"].lower()
    assert preflight.status_code == 200 and "authorization" in allowed and "content-type" in allowed
    for headers, status in (({"Authorization": f"Bearer {key}"}, 200), ({}, 401)):
        answer = HTTP.get(f"{url}/v1/models", headers={**page, **headers})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)
    stranger = HTTP.get(f"{url}/health", headers={"Origin": "https://other.example"})
    assert stranger.headers.get("access-control-allow-origin") == ("*" if origin == "*" else None)


def test_without_the_option_no_page_may_ask(url: str) -> None:
    assert "access-control-allow-origin" not in HTTP.get(f"{url}/health", headers={"Origin": "https://a.b"}).headers
