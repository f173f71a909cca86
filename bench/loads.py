"""What every system under test can be asked, and what it answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from client.open_loop import Planned, replay, serialise

_INFER = "/inference.GRPCInferenceService/ModelInfer"
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
        return asyncio.run(self._closed(payloads, concurrency, count))

    def open(self, texts: Sequence[str], instants: NDArray[np.float64]) -> Outcome:
        report = asyncio.run(replay(self._url, self._model, _planned(texts, instants), timeout_s=_TIMEOUT_S))
        summary = report.summary()
        return Outcome(report.latency_s[report.ok] * 1e3, summary.throughput_per_s, int((~report.ok).sum()))

    async def _closed(self, payloads: Sequence[bytes], concurrency: int, count: int) -> Outcome:
        numbers = iter(range(count))
        latencies: list[float] = []
        async with grpc.aio.insecure_channel(self._url) as channel:
            infer: Any = channel.unary_unary(_INFER)
            await infer(payloads[0], timeout=_TIMEOUT_S)

            async def client() -> None:
                for number in numbers:
                    before = time.perf_counter()
                    await infer(payloads[number % len(payloads)], timeout=_TIMEOUT_S)
                    latencies.append(time.perf_counter() - before)

            start = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(concurrency)))
            elapsed = time.perf_counter() - start
        return Outcome(np.array(latencies) * 1e3, count / elapsed)


def _planned(texts: Sequence[str], instants: NDArray[np.float64]) -> list[Planned]:
    inputs = [{"TEXT": np.array([[text.encode()]], dtype=np.object_)} for text in texts]
    return [Planned(float(at), made) for at, made in zip(instants, itertools.cycle(inputs), strict=False)]
