"""What every system under test can be asked, and what it answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from client.open_loop import INFER, Planned, replay, serialise

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """Latencies of the good answers in milliseconds, answers a second, and requests that failed."""

    latency_ms: NDArray[np.float64]
    per_second: float
    failed: int = 0


class System(Protocol):
    """One server, or library in a process of its own, that encodes texts."""

    name: str

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        """`concurrency` clients, each of which asks again once answered, `count` requests in all."""
        ...


class OpenSystem(System, Protocol):
    """A server, which can also be sent requests at given instants."""

    def open(self, texts: Sequence[str], instants: NDArray[np.float64]) -> Outcome:
        """One text at each instant (seconds), timed from it."""
        ...


class TritonModel:
    """A front model, asked over gRPC by an asyncio client in this process."""

    def __init__(self, name: str, url: str, model: str) -> None:
        self.name = name
        self._url = url
        self._model = model

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        payloads = serialise(self._model, _planned(texts, np.zeros(len(texts))))
        sent, answered = asyncio.run(ask_closed(self._url, payloads, concurrency, lambda number: number < count)).T
        return Outcome((answered - sent) * 1e3, count / (answered.max() - sent.min()))

    def open(self, texts: Sequence[str], instants: NDArray[np.float64]) -> Outcome:
        report = asyncio.run(replay(self._url, self._model, _planned(texts, instants), timeout_s=_TIMEOUT_S))
        summary = report.summary()
        return Outcome(report.latency_s[report.ok] * 1e3, summary.throughput_per_s, int((~report.ok).sum()))


async def ask_closed(
    url: str, payloads: Sequence[bytes], clients: int, goes_on: Callable[[int], bool]
) -> NDArray[np.float64]:
    """Each client asks again once answered, as long as `goes_on(number of the request)`; one request comes before all.

    Returns when each was sent and answered, [requests, 2], monotonic seconds.
    """
    numbers = itertools.count()
    asked: list[tuple[float, float]] = []
    async with grpc.aio.insecure_channel(url) as channel:
        infer: Any = channel.unary_unary(INFER)
        await infer(payloads[0], timeout=_TIMEOUT_S)

        async def client() -> None:
            while goes_on(number := next(numbers)):
                sent = time.monotonic()
                await infer(payloads[number % len(payloads)], timeout=_TIMEOUT_S)
                asked.append((sent, time.monotonic()))

        await asyncio.gather(*(client() for _ in range(clients)))
    return np.array(asked)


def _planned(texts: Sequence[str], instants: NDArray[np.float64]) -> list[Planned]:
    inputs = [{"TEXT": np.array([[text.encode()]], dtype=np.object_)} for text in texts]
    return [Planned(float(at), made) for at, made in zip(instants, itertools.cycle(inputs), strict=False)]
