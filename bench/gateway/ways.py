"""The two ways to a model: gRPC to Triton, and HTTP to the gateway before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import Collection
from typing import Protocol

import numpy as np

from shapeshift.errors import ShapeshiftError
from shapeshift.triton.async_client import AsyncClient, ModelCall

TEXT, PROMPT, TOKENS = "A text of any length.", "Once upon a time", 64
_READY_S, _TIMEOUT_S = 300.0, 600.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def wait_listed(url: str, models: Collection[str]) -> None:
    """Return when the gateway at `url` lists all of `models`. Raises ShapeshiftError after a minute."""
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            if {*models} <= {one["id"] for one in json.load(answer)["data"]}:
                return
        time.sleep(0.2)
    raise ShapeshiftError(f"{url} does not list {', '.join(models)} after {_READY_S:g} s")


class Way(Protocol):
    """One way. Times are in seconds."""

    async def wait_ready(self) -> None:
        """Return when it serves `encode` and `generate`."""

    async def embed(self) -> tuple[float]:
        """Ask for one embedding; how long it took."""

    async def generate(self) -> tuple[float, float]:
        """Ask for `TOKENS` tokens in a stream; the time to the first piece, and the mean time between pieces."""


class DirectWay:
    """`Way` over gRPC, through the client that the gateway has."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def wait_ready(self) -> None:
        return

    async def embed(self) -> tuple[float]:
        start = time.perf_counter()
        text = np.array([[TEXT.encode()]], dtype=object)
        await self._client.infer(ModelCall("encode", {"TEXT": text}, _TIMEOUT_S, ("EMBEDDING",)))
        return (time.perf_counter() - start,)

    async def generate(self) -> tuple[float, float]:
        start, times = time.perf_counter(), []
        inputs = {
            "text_input": np.array([PROMPT.encode()], dtype=object),
            "stream": np.array([True]),
            "max_tokens": np.array([TOKENS], np.int32),
            "ignore_eos": np.array([True]),
        }
        async for _ in self._client.stream(ModelCall("generate", inputs, _TIMEOUT_S)):
            times.append(time.perf_counter())
        return times[0] - start, (times[-1] - times[0]) / max(1, len(times) - 1)


class HttpWay:
    """`Way` over HTTP, with connections that stay open."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.partition(":")
        self._port = int(port)
        self._free: list[Connection] = []
        self._embed = self._request("embeddings", {"model": "encode", "input": TEXT, "encoding_format": "base64"})
        completion = {"model": "generate", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        self._generate = self._request("completions", completion)

    async def wait_ready(self) -> None:
        end = time.monotonic() + _READY_S
        while True:
            try:
                await self.embed()
                await self.generate()
                return
            except (OSError, ShapeshiftError):
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.2)

    async def embed(self) -> tuple[float]:
        start = time.perf_counter()
        reader, writer = connection = await self._sent(self._embed)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            writer.close()
            raise ShapeshiftError(body.decode())
        self._free.append(connection)
        return (time.perf_counter() - start,)

    async def generate(self) -> tuple[float, float]:
        start, times = time.perf_counter(), []
        reader, _ = connection = await self._sent(self._generate)
        async for line in reader:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            elif line.startswith(b"data: [DONE]"):
                break
        if not times:
            raise ShapeshiftError("the stream had no piece")
        await reader.readuntil(b"\r\n0\r\n\r\n")
        self._free.append(connection)
        return times[0] - start, (times[-1] - times[0]) / max(1, len(times) - 1)

    async def _sent(self, request: bytes) -> Connection:
        connection = self._free.pop() if self._free else await asyncio.open_connection(self._host, self._port)
        connection[1].write(request)
        return connection

    def _request(self, route: str, content: object) -> bytes:
        body = json.dumps(content).encode()
        head = f"POST /v1/{route} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
