"""The systems that encode texts, and the loads that each can be given."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from client.open_loop import INFER, PlannedRequest, replay, serialise

# A request that a baseline answers late is a result, too.
_TIMEOUT_S = 600.0
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """Latencies of successful requests in milliseconds, answers a second, and the number of failed requests."""

    latency_ms: NDArray[np.float64]
    per_second: float
    failed: int = 0

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

    def open(self, texts: Sequence[str], instants: NDArray[np.float64]) -> Outcome:
        """One text at each instant, in seconds; its latency counts from that instant."""
        ...


class TritonModel:
    """A front model, called over gRPC by an asyncio client in this process."""

    def __init__(self, name: str, url: str, model: str) -> None:
        self.name = name
        self._url = url
        self._model = model

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        payloads = serialise(self._model, _planned(texts, np.zeros(len(texts))))
        sent, answered = asyncio.run(closed_loop(self._url, payloads, concurrency, lambda number: number < count)).T
        good = ~np.isnan(answered)
        per_second = good.sum() / (answered[good].max() - sent.min()) if good.any() else 0.0
        return Outcome((answered - sent)[good] * 1e3, float(per_second), int((~good).sum()))

    def open(self, texts: Sequence[str], instants: NDArray[np.float64]) -> Outcome:
        planned = _planned(texts, instants)
        report = asyncio.run(replay(self._url, self._model, planned, timeout_s=_TIMEOUT_S, drain_s=_TIMEOUT_S))
        summary = report.summary()
        return Outcome(report.latency_s[report.ok] * 1e3, summary.throughput_per_s, int((~report.ok).sum()))


class EncodeWorker:
    """A `bench.encode.worker` process, which encodes without a server."""

    def __init__(self, name: str, kind: str, folder: Path) -> None:
        self.name = name
        command = [sys.executable, "-m", "bench.encode.worker", kind, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        assert self._process.stdin is not None
        request = {"texts": list(texts), "concurrency": concurrency, "count": count}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Outcome(np.array(answer["latency_ms"]), answer["per_second"])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: the worker process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def closed_loop(
    url: str, payloads: Sequence[bytes], clients: int, more: Callable[[int], bool]
) -> NDArray[np.float64]:
    """Each client sends the next request when the last one is answered, while `more(number of the request)` is true.

    One unmeasured request goes first. Returns [requests, 2]: when each was sent and answered, in monotonic seconds;
    not a number for the answer of one that was refused or failed: its client pauses before the next.
    """
    numbers = itertools.count()
    times: list[tuple[float, float]] = []
    async with grpc.aio.insecure_channel(url) as channel:
        infer: Any = channel.unary_unary(INFER)
        await infer(payloads[0], timeout=_TIMEOUT_S)

        async def client() -> None:
            while more(number := next(numbers)):
                sent = time.monotonic()
                try:
                    await infer(payloads[number % len(payloads)], timeout=_TIMEOUT_S)
                    times.append((sent, time.monotonic()))
                except grpc.RpcError:
                    times.append((sent, math.nan))
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(client() for _ in range(clients)))
    return np.array(times)


def _planned(texts: Sequence[str], instants: NDArray[np.float64]) -> list[PlannedRequest]:
    inputs = [{"TEXT": np.array([[text.encode()]], dtype=np.object_)} for text in texts]
    return [PlannedRequest(float(at), tensors) for at, tensors in zip(instants, itertools.cycle(inputs), strict=False)]
