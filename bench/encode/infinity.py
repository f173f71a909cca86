"""infinity's HTTP servers as systems of `bench.encode`."""

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


class InfinityServer:
    """An infinity server, called over HTTP by an asyncio client in this process."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        load = asyncio.run(closed_loop(self._url, texts, concurrency, count=count))
        return Outcome(load.latencies * 1e3, load.rate)

    def open(self, texts: Sequence[str], instants: NDArray[np.float64]) -> Outcome:
        load = asyncio.run(open_loop(self._url, texts, instants.tolist()))
        return Outcome(load.latencies * 1e3, load.rate)


@contextmanager
def infinity_servers(engines: Sequence[Engine], checkpoint: Path, build: Path) -> Iterator[list[InfinityServer]]:
    """One infinity server for each engine name."""
    with ExitStack() as stack:
        started = []
        for engine in engines:
            peer = stack.enter_context(Infinity(engine, checkpoint, build))
            started.append(InfinityServer(f"infinity {engine}", peer.url))
        yield started
