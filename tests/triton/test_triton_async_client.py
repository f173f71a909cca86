"""The asynchronous client against a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from shapeshift.errors import ModelError, ModelGoneError, OverloadedError, ShapeshiftError
from shapeshift.triton.async_client import AsyncClient, ClientThread, ModelCall
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import ServerSettings

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(
    add_model: Callable[..., object],
    make_settings: Callable[..., ServerSettings],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("client")
    add_model(folder / "repository", "echo")
    add_model(folder / "repository", "slow", delay_s="3")
    settings = make_settings(
        repositories=(folder / "repository",), models=("echo", "slow"), run_directory=folder / "run"
    )
    with TritonServer(settings) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: TritonServer) -> AsyncClient:
    return AsyncClient(server.grpc_url)


@pytest.fixture
def thread(client: AsyncClient) -> Iterator[ClientThread]:
    made = ClientThread(client.close)
    yield made
    made.close()


def ask(thread: ClientThread, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What a task on the client's event loop returns or raises."""
    found: list[Any] = []

    async def task() -> None:
        try:
            found.append(await work())
        except ShapeshiftError as error:
            found.append(error)

    thread.start(task()).result(30)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def call(model: str = "echo", values: list[float] | None = None, timeout_s: float = 20.0, **more: Any) -> ModelCall:
    return ModelCall(model, {"IN": np.array([values or [1.0]], np.float32)}, timeout_s, **more)


def test_many_calls_at_once(client: AsyncClient, thread: ClientThread) -> None:
    lock, left, answers = threading.Event(), [200], {}

    async def one(number: int) -> None:
        answers[number] = (await client.infer(call(values=[number, 1.0])))["OUT"].tolist()
        left[0] -= 1
        if not left[0]:
            lock.set()

    for number in range(200):
        thread.start(one(number))
    assert lock.wait(120)
    assert answers == {number: [[number, 1.0]] for number in range(200)}


def test_a_stream_answers_too(client: AsyncClient, thread: ClientThread) -> None:
    assert ask(thread, lambda: client.first(call(values=[7.0], outputs=["OUT"])))["OUT"].tolist() == [[7.0]]


@pytest.mark.parametrize("how", ["infer", "first"])
def test_errors_are_ours(client: AsyncClient, thread: ClientThread, how: str) -> None:
    method = getattr(client, how)
    with pytest.raises((ModelGoneError, ModelError)):
        ask(thread, lambda: method(call("absent")))
    with pytest.raises((ModelError, ShapeshiftError), match="OTHER"):
        ask(thread, lambda: method(ModelCall("echo", {"OTHER": np.zeros((1, 1), np.float32)}, 20.0)))


@pytest.mark.parametrize("how", ["infer", "first"])
def test_every_call_ends_within_its_limit(client: AsyncClient, thread: ClientThread, how: str) -> None:
    before = time.monotonic()
    with pytest.raises(OverloadedError, match="model slow gave no answer within 0.5 s"):
        ask(thread, lambda: getattr(client, how)(call("slow", timeout_s=0.5)))
    assert time.monotonic() - before < 15


def test_close_ends_what_is_in_flight(server: TritonServer) -> None:
    client = AsyncClient(server.grpc_url)
    thread = ClientThread(client.close)
    ended = threading.Event()

    async def work() -> None:
        try:
            await client.infer(call("slow"))
        finally:
            ended.set()

    thread.start(work())
    time.sleep(0.3)
    thread.close()
    assert ended.is_set()
