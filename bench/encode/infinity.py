"""HTTP servers of embeddings, infinity's and others, as systems of `bench.encode`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common.systems import Outcome
from bench.peers.http_load import closed_loop, open_loop
from bench.peers.infinity import Engine, Infinity


class HttpServer:
    """A server with a route /embeddings below `url`, called by an asyncio client in this process.

    model: the one to name in each request; empty for a server that has only one.
    """

    def __init__(self, name: str, url: str, model: str = "") -> None:
        self.name = name
        self._url = url
        self._model = model

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        load = asyncio.run(closed_loop(self._url, texts, concurrency, count=count, model=self._model))
        return Outcome(load.latencies * 1e3, load.rate, load.failed)

    def open(self, texts: Sequence[str], instants: NDArray[np.float64]) -> Outcome:
        load = asyncio.run(open_loop(self._url, texts, instants.tolist(), model=self._model))
        return Outcome(load.latencies * 1e3, load.rate, load.failed)


@contextmanager
def infinity_servers(engines: Sequence[Engine], checkpoint: Path, build: Path) -> Iterator[list[HttpServer]]:
    """One infinity server for each engine name."""
    with ExitStack() as stack:
        started = []
        for engine in engines:
            peer = stack.enter_context(Infinity(engine, checkpoint, build))
            started.append(HttpServer(f"infinity {engine}", peer.url))
        yield started
