"""Clients that send no end of their headers, open many connections, or do not read."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from shapeshift.gateway.http import api_keys
from shapeshift.gateway.http.server import within
from tests.gateway.fake_triton import FakeTriton
from tests.waiting import wait_for

FEW_FILES = """
import resource, socket

resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
from shapeshift.gateway.http.server import make_server
from shapeshift.gateway.settings import GatewaySettings

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = make_server(GatewaySettings(triton=("127.0.0.1:9",), port=port))
started = server.startup

async def startup(*given, **more):
    await started(*given, **more)
    print(f"http://127.0.0.1:{port}", flush=True)

server.startup = startup
server.run()
"""
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


@pytest.fixture(scope="module")
def hasty(start_gateway: Callable[..., str]) -> str:
    return start_gateway(FakeTriton(), head_timeout_s=0.3)


@pytest.mark.parametrize("begin", [b"", b"\r\n", b"POST", HEAD, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET"])
def test_half_a_head_ends_its_connection(hasty: str, begin: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(begin)
        assert rest(connection).count(b"HTTP/1.1 200") == begin.count(b"health")


def test_a_connection_stays_open_between_requests(hasty: str) -> None:
    with connect(hasty) as connection:
        for _ in range(2):
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n")
            assert connection.recv(1 << 20).startswith(b"HTTP/1.1 200")
            connection.settimeout(0.6)
            with pytest.raises(TimeoutError):
                while True:
                    assert connection.recv(1 << 20)
            connection.settimeout(20)


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
    assert httpx2.get(f"{url}/health", headers={"A": "a" * 40_000}).status_code == 200


def test_connections_are_bounded(start_gateway: Callable[..., str]) -> None:
    url = start_gateway(FakeTriton(), max_connections=2)
    with connect(url) as one, connect(url) as two, connect(url) as three:
        refused = rest(three)
        assert b"HTTP/1.1 429" in refused and b"overloaded" in refused
        for connection in (one, two):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_for(lambda: httpx2.get(f"{url}/health").status_code == 200)


@pytest.mark.parametrize("closing", [True, False])
def test_a_client_that_does_not_read_is_dropped(start_gateway: Callable[..., str], closing: bool) -> None:
    url = start_gateway(FakeTriton(), stall_timeout_s=0.3)
    end = b"Connection: close\r\n" * closing
    # The answer is as long as the prompt: more than the kernel holds for a client.
    body = b'{"model":"generate","prompt":"' + b"x" * (16 << 20) + b'"}'
    with connect(url) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(body)
        connection.sendall(head + end + b"\r\n" + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        with pytest.raises(ConnectionError):
            wait_for(lambda: connection.send(b"x") and False, timeout_s=10, pause_s=0.05)


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


def test_beyond_the_open_files_connections_are_refused(tmp_path: Path) -> None:
    """A gateway whose hard limit leaves room for a few connections answers all of them, the others with 429."""
    command = [sys.executable, "-c", FEW_FILES]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stderr.readline() == "max_connections: 60, not 8192: ulimit -n is 120\n"
            url = process.stdout.readline().strip()
            # Half of 120 open files.
            with contextlib.ExitStack() as stack:
                held = [stack.enter_context(connect(url)) for _ in range(60)]
                for connection in held:
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                    assert connection.recv(100).startswith(b"HTTP/1.1 503")
                for _ in range(100):
                    assert rest(stack.enter_context(connect(url))).startswith(b"HTTP/1.1 429")
        finally:
            process.terminate()


@pytest.mark.parametrize("origin", ["https://page.example", "*"])
def test_pages_of_an_origin_may_ask(start_gateway: Callable[..., str], tmp_path: Path, origin: str) -> None:
    key = api_keys.add(tmp_path / "keys", "ana")
    url = start_gateway(FakeTriton(), cors_origins=(origin,), api_keys=tmp_path / "keys")
    page = {"Origin": "https://page.example"}
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = httpx2.options(f"{url}/v1/embeddings", headers={**page, **ask})
    allowed = preflight.headers["access-control-allow-headers"].lower()
    assert preflight.status_code == 200 and "authorization" in allowed and "content-type" in allowed
    for headers, status in (({"Authorization": f"Bearer {key}"}, 200), ({}, 401)):
        answer = httpx2.get(f"{url}/v1/models", headers={**page, **headers})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)
    stranger = httpx2.get(f"{url}/health", headers={"Origin": "https://other.example"})
    assert stranger.headers.get("access-control-allow-origin") == ("*" if origin == "*" else None)


def test_without_the_option_no_page_may_ask(url: str) -> None:
    assert "access-control-allow-origin" not in httpx2.get(f"{url}/health", headers={"Origin": "https://a.b"}).headers
