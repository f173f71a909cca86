"""What the bench of the gateway measures, against a small server with one slot."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.gateway import cancellation
from bench.gateway.ways import HttpWay
from bench.peers import http_load
from shapeshift.errors import ShapeshiftError


class OneSlot:
    """Streams to one client at a time. A stream ends after `pieces`, or `frees_s` after its client has gone."""

    def __init__(self, frees_s: float, pieces: int = 10**6) -> None:
        self._frees_s, self._pieces = frees_s, pieces
        self._slot = asyncio.Lock()
        self.bodies: list[dict[str, object]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        gone = asyncio.create_task(reader.read())
        async with self._slot:
            for _ in range(self._pieces):
                writer.write(b"data: {}\n\n")
                await asyncio.sleep(0.005)
                if gone.done():
                    await asyncio.sleep(self._frees_s)
                    break
            else:
                writer.write(b"data: [DONE]\n\n")
        writer.close()


async def measured(slot: OneSlot, trials: int) -> list[float]:
    server = await asyncio.start_server(slot.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return list(await cancellation.times(HttpWay(f"127.0.0.1:{port}"), trials))


def test_the_time_until_a_slot_is_free_is_measured() -> None:
    slot = OneSlot(frees_s=0.2)
    assert min(asyncio.run(measured(slot, 3))) >= 0.2
    assert {body["model"] for body in slot.bodies} == {cancellation.MODEL}


def test_streams_that_end_by_themselves_measure_nothing() -> None:
    with pytest.raises(ShapeshiftError, match="only 0 of 1 trials"):
        asyncio.run(measured(OneSlot(0.0, pieces=1), 1))


def test_a_server_of_several_models_is_told_which() -> None:
    (named,), (bare,) = (http_load._bodies(["a"], "float", model) for model in ("encode", ""))
    assert json.loads(named) == {"model": "encode", **json.loads(bare)} and "model" not in json.loads(bare)
