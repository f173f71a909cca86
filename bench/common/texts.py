"""Systems that encode texts, how they are called, and the cells of a benchmark of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import grpc
import numpy as np
from numpy.typing import NDArray

from bench.common.cells import Cells, Run
from bench.common.output import BUILD, FOLDER, progress
from bench.common.worker import Worker
from client import perf_analyzer
from client.open_loop import INFER, PlannedRequest, replay, serialise
from shapeshift.errors import ShapeshiftError, UnsupportedError
from shapeshift.workloads import lengths
from shapeshift.workloads.arrivals import poisson
from shapeshift.workloads.text import TextMaker

CHECKPOINT = BUILD / "checkpoints" / "all-MiniLM-L6-v2"
# A request that a baseline answers late is a result, too.
_TIMEOUT_S = 600.0
_PAUSE_S = 0.05
# uvicorn closes a connection after 5 idle seconds; a request sent at that moment is lost.
_KEEPALIVE_S = 3.0
_FAILURES = (grpc.RpcError, UnsupportedError, aiohttp.ClientError, TimeoutError)
SLOW = {"ST": 8}
"""Systems that get this many times fewer requests, so that all cells last about as long."""

Times = NDArray[np.float64]
Send = Callable[[int], Awaitable[object]]
"""Sends the request of this number, and returns with its answer; one of _FAILURES where there is none."""
Closed = Callable[[Sequence[str], int, int], "Outcome"]
"""See `System.closed`."""


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


def figures(run: Run[Outcome]) -> dict[str, float]:
    """Of a run. processor_ms: of a request, in systems, idle ones too, and clients; other load hardly changes it."""
    outcome, ms = run.result, run.result.latency_ms
    times = [ms.mean(), *np.percentile(ms, [50, 98, 99])] if len(ms) else [math.nan] * 4
    return {
        "per_second": round(outcome.per_second, 2),
        **dict(zip(("mean_ms", "p50_ms", "p98_ms", "p99_ms"), np.round(times, 3).tolist(), strict=True)),
        "failed": outcome.failed,
        "processor_ms": round(run.own_s * 1e3 / max(1, len(ms) + outcome.failed), 2),
    }


class System(Protocol):
    """A server, or a library in its own process, that encodes texts."""

    name: str

    def closed(self, texts: Sequence[str], clients: int, count: int) -> Outcome:
        """`clients` that each send the next request when one is answered; `count` requests in all."""
        ...


class TritonModel:
    """A front model, called over gRPC by an asyncio client in this process."""

    def __init__(self, name: str, url: str, model: str) -> None:
        self.name, self._url, self._model = name, url, model

    def closed(self, texts: Sequence[str], clients: int, count: int) -> Outcome:
        payloads = serialise(self._model, _planned(texts, np.zeros(len(texts))))
        return Outcome.of(asyncio.run(closed_loop(self._url, payloads, clients, lambda number: number < count)))

    def open(self, texts: Sequence[str], instants: Times) -> Outcome:
        """One text at each instant, in seconds; its latency counts from that instant."""
        planned = _planned(texts, instants)
        report = asyncio.run(replay(self._url, self._model, planned, timeout_s=_TIMEOUT_S, drain_s=_TIMEOUT_S))
        return Outcome(report.latency_s[report.ok] * 1e3, report.summary().throughput_per_s, int((~report.ok).sum()))

    def analyzed(self, texts: Sequence[str], clients: int, count: int) -> Outcome:
        """As `closed`, by perf_analyzer."""
        inputs = [{"TEXT": [text]} for text in texts]
        try:
            measured = perf_analyzer.measure(self._url, self._model, inputs, clients, count, timeout_s=40.0 + 2 * count)
        except ShapeshiftError as error:
            progress(f"perf_analyzer, {self._model}: {error}")
            return Outcome(np.array([]), 0.0, count)
        return Outcome(measured.latency_ms, measured.per_second)


class HttpServer:
    """A server with OpenAI's `POST <url>/embeddings`; answers are read and not parsed, to use little of its cores.

    model: the one to name in each request; empty for a server that has only one.
    """

    def __init__(self, name: str, url: str, model: str = "") -> None:
        self.name, self._url = name, url
        self._common = {"encoding_format": "base64", **({"model": model} if model else {})}

    def closed(self, texts: Sequence[str], clients: int, count: int) -> Outcome:
        return Outcome.of(asyncio.run(self._closed(texts, clients, count)))

    async def _closed(self, texts: Sequence[str], clients: int, count: int) -> Times:
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
            return await in_flight(send, clients, lambda number: number < count)


class InProcess:
    """A process of its own that encodes without a server, and answers as `bench.encode.worker` does."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._worker = Worker(name, command, FOLDER / "run" / f"{name.replace(' ', '-')}.log")
        self._worker.wait_ready()
        self.stop = self._worker.stop

    def closed(self, texts: Sequence[str], clients: int, count: int) -> Outcome:
        answer = self._worker.ask(texts=list(texts), clients=clients, count=count)
        return Outcome(np.array(answer["latency_ms"]), answer["per_second"])

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Of each text, [texts, width]."""
        return np.array(self._worker.ask(texts=list(texts))["vectors"], np.float32)


def engines_alone(folder: Path, name: str = "in-process") -> InProcess:
    """The engine set of a folder."""
    return InProcess(name, [sys.executable, "-m", "bench.encode.worker", str(folder)])


class TextBench:
    """Closed loops of short texts on several systems. requests: of a cell; perf_analyzer's cells are named after it."""

    def __init__(self, seed: int, requests: int, rounds: int) -> None:
        self.cells = Cells(figures, seed)
        self.texts = short_texts(seed)
        self._seed, self._requests, self._rounds = seed, requests, rounds

    def closed(self, systems: Sequence[System], clients: Sequence[int]) -> None:
        """Run closed loops of each number of clients."""
        for count in clients:
            self._measure(f"closed {count}", count, {system.name: system.closed for system in systems})

    def open(self, fronts: Sequence[TritonModel], rate: float) -> None:
        """Send the texts at random instants, so many a second on average."""
        instants = poisson(rate, 2 * self._requests / rate, np.random.default_rng(self._seed))
        calls = {front.name: partial(front.open, self.texts, instants) for front in fronts}
        self.cells.measure(f"open, {rate:.0f}/s", calls, self._rounds)

    def analyzed(self, fronts: Sequence[TritonModel], bare: Sequence[System], clients: Sequence[int]) -> None:
        """Run perf_analyzer on the fronts, and the bare engines on the same texts."""
        for count in clients:
            calls = {front.name: front.analyzed for front in fronts} | {one.name: one.closed for one in bare}
            self._measure(f"perf_analyzer {count}", count, calls)

    def _measure(self, load: str, clients: int, calls: Mapping[str, Closed]) -> None:
        counts = {name: max(24, 3 * clients, self._requests // SLOW.get(name, 1)) for name in calls}
        runs = {name: partial(call, self.texts, clients, counts[name]) for name, call in calls.items()}
        self.cells.measure(load, runs, self._rounds)


def short_texts(seed: int, count: int = 400) -> list[str]:
    """Texts as short as posts, by the tokens of the model that encodes them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rng = np.random.default_rng(seed)
    maker = TextMaker(rng, lambda text: len(tokenizer.encode(text).ids))
    return [maker.text(max(3, int(length))) for length in lengths.short().sample(rng, count)]


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


def _planned(texts: Sequence[str], instants: Times) -> list[PlannedRequest]:
    inputs = [{"TEXT": np.array([[text.encode()]], dtype=np.object_)} for text in texts]
    return [PlannedRequest(float(at), tensors) for at, tensors in zip(instants, itertools.cycle(inputs), strict=False)]
