"""Open load on the fronts of a fleet: each request at the next node that the fleet file names at that moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.triton.async_client import AsyncClient, ModelCall

_READ_S = 0.5
_LIMIT_S = 30.0


class Result(NamedTuple):
    """node: whose front was asked; began_s: since the load's start; error: empty for an answer."""

    node: str
    began_s: float
    took_s: float
    error: str


def steady(per_s: float, tokens: int = 3) -> Iterator[tuple[float, int]]:
    """A trace without end: texts of one length, so many a second."""
    return ((number / per_s, tokens) for number in count())


class MemberLoad:
    """Sends texts from entry to exit of its block, or to the end of `trace`, and then waits for all answers.

    file: a fleet file with membership `static`, read again twice a second. trace: when each text is sent, in seconds
    since the start, and its tokens. A client that finds no server at a node asks the next one, at most once for each
    other node: such a request counts for the last one.
    """

    def __init__(self, file: Path, trace: Iterable[tuple[float, int]], model: str = "encode") -> None:
        self.results: list[Result] = []
        self._file, self._trace, self._model = file, trace, model
        self._stopped = threading.Event()
        self._clients: dict[str, AsyncClient] = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    @property
    def failed(self) -> list[Result]:
        """The requests that got an error."""
        return [one for one in self.results if one.error]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    async def _run(self) -> None:
        began, running, read_at = time.perf_counter(), [], 0.0
        nodes = settings.read(self._file).nodes
        for number, (at_s, tokens) in enumerate(self._trace):
            await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
            if self._stopped.is_set():
                break
            now = time.perf_counter()
            if now > read_at + _READ_S:
                nodes, read_at = settings.read(self._file).nodes, now
            for node in nodes:
                if node.name not in self._clients:
                    client = AsyncClient(node.grpc.address, node.grpc.tls)
                    self._clients[node.name] = client
            names = [nodes[(number + turn) % len(nodes)].name for turn in range(len(nodes))]
            running.append(asyncio.create_task(self._ask(names, self._call(tokens), now - began)))
        await asyncio.gather(*running)
        for client in self._clients.values():
            await client.close()

    def _call(self, tokens: int) -> ModelCall:
        inputs = {"INPUT_IDS": np.full((1, tokens), 101), "ATTENTION_MASK": np.ones((1, tokens), np.int64)}
        return ModelCall(self._model, inputs, _LIMIT_S)

    async def _ask(self, names: list[str], call: ModelCall, began_s: float) -> None:
        start = time.perf_counter()
        for name in names:
            try:
                await self._clients[name].infer(call)
            except ShapeshiftError as error:
                problem = str(error)
                if "failed to connect" in problem.lower():
                    continue
            else:
                problem = ""
            break
        self.results.append(Result(name, began_s, time.perf_counter() - start, problem))
