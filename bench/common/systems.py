"""The systems that encode texts, and the loads that each can be given."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import grpc
import numpy as np
from numpy.typing import NDArray

from bench.common.output import FOLDER
from bench.common.worker import Worker
from client.open_loop import INFER, PlannedRequest, replay, serialise
from shapeshift.errors import UnsupportedError

# A request that a baseline answers late is a result, too.
_TIMEOUT_S = 600.0
_PAUSE_S = 0.05
# uvicorn closes a connection after 5 idle seconds; a request sent at that moment is lost.
_KEEPALIVE_S = 3.0
_FAILURES = (grpc.RpcError, UnsupportedError, aiohttp.ClientError, TimeoutError)

Times = NDArray[np.float64]
Send = Callable[[int], Awaitable[object]]
"""Sends the request of this number, and returns with its answer; one of _FAILURES where there is none."""


@dataclass(frozen=True)
class Outcome:
    """Latencies of successful requests in milliseconds, answers a second, and the number of failed requests."""

    latency_ms: Times
    per_second: float
    failed: int = 0

    @classmethod
    def of(cls, times: Times) -> Outcome:
        """times: [requests, 2], when each was due and when it was answered, in seconds; not a number for no answer."""
        due, answered = times.T
        good = ~np.isnan(answered)
        per_second = good.sum() / (answered[good].max() - due.min()) if good.any() else 0.0
        return cls((answered - due)[good] * 1e3, float(per_second), int((~good).sum()))

    @property
    def mean_ms(self) -> float:
        """Of the latencies; not a number where no request succeeded."""
        return float(self.latency_ms.mean()) if len(self.latency_ms) else math.nan

    def percentile(self, q: float) -> float:
        """Of the latencies; not a number where no request succeeded."""
        return float(np.percentile(self.latency_ms, q)) if len(self.latency_ms) else math.nan


class System(Protocol):
    """A server, or a library in its own process, that encodes texts."""

    name: str

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        """`concurrency` clients, each of which sends its next request when one is answered; `count` requests in all."""
        ...


class OpenSystem(System, Protocol):
    """A server, which also accepts requests at given instants."""

    def open(self, texts: Sequence[str], instants: Times) -> Outcome:
        """One text at each instant, in seconds; its latency counts from that instant."""
        ...


class TritonModel:
    """A front model, called over gRPC by an asyncio client in this process."""

    def __init__(self, name: str, url: str, model: str) -> None:
        self.name, self._url, self._model = name, url, model

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        payloads = serialise(self._model, _planned(texts, np.zeros(len(texts))))
        return Outcome.of(asyncio.run(closed_loop(self._url, payloads, concurrency, lambda number: number < count)))

    def open(self, texts: Sequence[str], instants: Times) -> Outcome:
        planned = _planned(texts, instants)
        report = asyncio.run(replay(self._url, self._model, planned, timeout_s=_TIMEOUT_S, drain_s=_TIMEOUT_S))
        return Outcome(report.latency_s[report.ok] * 1e3, report.summary().throughput_per_s, int((~report.ok).sum()))


class HttpServer:
    """A server with OpenAI's `POST <url>/embeddings`; answers are read and not parsed, to use little of its cores.

    model: the one to name in each request; empty for a server that has only one.
    """

    def __init__(self, name: str, url: str, model: str = "") -> None:
        self.name, self._url = name, url
        self._common = {"encoding_format": "base64", **({"model": model} if model else {})}

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        async def run() -> Times:
            async with self._connected(texts) as send:
                return await in_flight(send, concurrency, lambda number: number < count)

        return Outcome.of(asyncio.run(run()))

    def open(self, texts: Sequence[str], instants: Times) -> Outcome:
        async def run() -> Times:
            async with self._connected(texts) as send:
                return await at_instants(send, instants)

        return Outcome.of(asyncio.run(run()))

    @contextlib.asynccontextmanager
    async def _connected(self, texts: Sequence[str]) -> AsyncIterator[Send]:
        bodies = [json.dumps({"input": [text], **self._common}).encode() for text in texts]

        async def send(number: int) -> None:
            async with session.post(f"{self._url}/embeddings", data=bodies[number % len(bodies)]) as response:
                answer = await response.read()
                if response.status != 200:
                    raise UnsupportedError(f"{self._url} answered {response.status}: {answer[:300]!r}")

        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            headers={"Content-Type": "application/json"},
        ) as session:
            yield send


class EncodeWorker:
    """A `bench.encode.worker` process, which encodes without a server."""

    def __init__(self, name: str, kind: str, folder: Path) -> None:
        self.name = name
        command = [sys.executable, "-m", "bench.encode.worker", kind, str(folder)]
        self._worker = Worker(name, command, FOLDER / "run" / f"{kind}.log")
        self._worker.wait_ready()
        self.stop = self._worker.stop

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        answer = self._worker.ask(texts=list(texts), concurrency=concurrency, count=count)
        return Outcome(np.array(answer["latency_ms"]), answer["per_second"])


async def closed_loop(url: str, payloads: Sequence[bytes], clients: int, more: Callable[[int], bool]) -> Times:
    """`in_flight` of serialised gRPC requests, sent in turn, after an unmeasured one."""
    async with grpc.aio.insecure_channel(url) as channel:
        infer: Any = channel.unary_unary(INFER)
        await infer(payloads[0], timeout=_TIMEOUT_S)
        return await in_flight(
            lambda number: infer(payloads[number % len(payloads)], timeout=_TIMEOUT_S), clients, more
        )


async def in_flight(send: Send, clients: int, more: Callable[[int], bool]) -> Times:
    """Each client sends the next request when the last one is answered, while `more(number of the request)` is true.

    [requests, 2], as in `Outcome.of`; the client of a request that was refused or failed pauses before the next.
    """
    numbers = itertools.count()
    times: list[tuple[float, float]] = []

    async def client() -> None:
        while more(number := next(numbers)):
            sent = time.monotonic()
            try:
                await send(number)
                times.append((sent, time.monotonic()))
            except _FAILURES:
                times.append((sent, math.nan))
                await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(client() for _ in range(clients)))
    return np.array(times).reshape(-1, 2)


async def at_instants(send: Send, instants: Times) -> Times:
    """A request at each of the ascending `instants`, however many are unanswered; [requests, 2] as in `Outcome.of`."""
    start = time.monotonic()
    times: Times = np.stack([start + instants, np.full(len(instants), math.nan)], axis=1)

    async def one(number: int) -> None:
        with contextlib.suppress(*_FAILURES):
            await send(number)
            times[number, 1] = time.monotonic()

    async with asyncio.TaskGroup() as group:
        for number, due in enumerate(times[:, 0].tolist()):
            await asyncio.sleep(due - time.monotonic())
            group.create_task(one(number))
    return times


def _planned(texts: Sequence[str], instants: Times) -> list[PlannedRequest]:
    inputs = [{"TEXT": np.array([[text.encode()]], dtype=np.object_)} for text in texts]
    return [PlannedRequest(float(at), tensors) for at, tensors in zip(instants, itertools.cycle(inputs), strict=False)]
