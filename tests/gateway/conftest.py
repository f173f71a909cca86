"""A gateway over a Triton in this process, and clients of it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
import uvicorn

from shapeshift.gateway.http.server import make_server
from shapeshift.gateway.settings import GatewaySettings, Limits
from tests.gateway.fake_triton import FakeTriton
from tests.waiting import wait_for

StartGateway = Callable[..., str]
# How tests ask over HTTP: on a busy machine an answer takes long. Each has a connection of its own.
HTTP = httpx2.Client(timeout=60, limits=httpx2.Limits(max_keepalive_connections=0))


@pytest.fixture(scope="module")
def start_gateway(free_ports: Callable[[int], list[int]]) -> Iterator[StartGateway]:
    """A function that starts a gateway over Tritons of this process, with settings and limits; returns its URL."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(*servers: FakeTriton, **settings: Any) -> str:
        (port,) = free_ports(1)
        names = settings.keys() & {field.name for field in dataclasses.fields(Limits)}
        limits = {name: settings.pop(name) for name in names}
        options = GatewaySettings(triton=tuple(one.url for one in servers), port=port, **settings)
        server = make_server(options, servers, Limits(**limits))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_for(lambda: server.started, timeout_s=30, pause_s=0.01)
        started.append((server, thread))
        return f"http://127.0.0.1:{port}"

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture(scope="module")
def url(start_gateway: StartGateway, triton: FakeTriton) -> str:
    """A gateway that the tests of a module share, and that lists what its Triton serves."""
    url = start_gateway(triton)
    wait_for(lambda: HTTP.get(f"{url}/v1/models").json()["data"], pause_s=0.05)
    return url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "triton" in request.fixturenames:
        fake: FakeTriton = request.getfixturevalue("triton")
        fake.calls, fake.failure, fake.late_failure, fake.gone, fake.pause_s = [], None, None, False, 0.0
        fake.answers, fake.cached = [], None
