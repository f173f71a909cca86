"""Clients that misbehave: they vanish, never read, or ask for more than the server can give."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator

from bench.drill import questions
from bench.drill.faults.scene import Fault, Scene
from bench.drill.faults.signals import WHOLE_AFTER_STOP_S, WHOLE_S

_AT_ONCE = 25
_LONG_TOKENS = 400
_NEVER_READ, _NEVER_READ_S = 16, 10.0
_OVERLOAD, _OVERLOAD_S = 3.0, 6.0
_OVERLOADED = ("encode", "classify_image", "generate")
_TIMEOUT_S = 60.0


def faults() -> Iterator[Fault]:
    """Each of them."""
    yield Fault("clients vanish mid-stream", _vanish, WHOLE_S, quick=True)
    yield Fault("clients never read their streams", _never_read, WHOLE_S, quick=True)
    yield Fault(f"overload, {_OVERLOAD:g} times what it carries", _overload, WHOLE_AFTER_STOP_S)


def _vanish(scene: Scene) -> bool:
    """Half of the clients cancel their gRPC stream after the first piece, half reset their HTTP connection."""

    async def over_grpc() -> None:
        payload = questions.prompt_payload("generate", "A list of all", _LONG_TOKENS)
        call = await scene.traffic.stream("generate", payload, _TIMEOUT_S)
        async for _ in call:
            break
        call.cancel()

    async def over_http() -> None:
        reader, writer = await asyncio.open_connection(*scene.site.http_address)
        writer.write(_request(_LONG_TOKENS))
        await reader.readuntil(b"data:")
        writer.transport.abort()

    async def all_of_them() -> int:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(number: int) -> None:
            async with limit:
                await asyncio.wait_for(over_http() if number % 2 else over_grpc(), _TIMEOUT_S)

        ended = await asyncio.gather(*map(one, range(scene.clients)), return_exceptions=True)
        return sum(isinstance(one, BaseException) for one in ended)

    began = time.monotonic()
    failed = scene.traffic.run(all_of_them())
    scene.say(f"{scene.clients} clients vanished in {time.monotonic() - began:.0f} s; {failed} had got no first piece")
    return False


def _never_read(scene: Scene) -> bool:
    clients = []
    for _ in range(_NEVER_READ):
        client = socket.socket()
        # As little room as the kernel gives.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.connect(scene.site.http_address)
        client.sendall(_request(_LONG_TOKENS))
        clients.append(client)
    time.sleep(_NEVER_READ_S)
    for client in clients:
        client.close()
    return False


def _overload(scene: Scene) -> bool:
    rates = {front: _OVERLOAD * scene.carried[front] for front in _OVERLOADED}
    with scene.traffic.burst(rates, int(scene.rng.integers(2**31))):
        time.sleep(_OVERLOAD_S)
    return False


def _request(tokens: int) -> bytes:
    body = json.dumps({"text_input": "A list of all", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = "POST /v2/models/generate/generate_stream HTTP/1.1\r\nHost: drill\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n{body}".encode()
