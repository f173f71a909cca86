"""What the gateway adds to a request, beside the direct gRPC path.

One keep-alive connection for each client, with requests made once. The two ways take turns, so that other load on the
machine meets both; the gateway, the server and the clients share the cores.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from bench.common.output import Row
from bench.gateway.ways import Way

CLIENTS = 32


async def measured(direct: Way, http: Way, requests: int, rounds: int, seconds: float) -> tuple[list[Row], Row]:
    """Medians in ms with one client, and embeddings a second with CLIENTS: direct, and through the gateway."""
    rows: list[Row] = []
    asks: dict[str, Callable[[Way], Awaitable[tuple[float, ...]]]] = {
        "embedding": lambda way: way.embed(),
        "first token, between tokens": lambda way: way.generate(),
    }
    for name, ask in asks.items():
        times: dict[Way, list[tuple[float, ...]]] = {direct: [], http: []}
        for _ in range(requests if name == "embedding" else requests // 10):
            for way, of_way in times.items():
                of_way.append(await ask(way))
        for place, part in enumerate(name.split(", ")):
            ms = [statistics.median(took[place] for took in times[way]) * 1e3 for way in (direct, http)]
            rows.append({"p50, ms": part, "direct": ms[0], "gateway": ms[1], "added": ms[1] - ms[0]})
    rates: dict[Way, list[float]] = {direct: [], http: []}
    for _ in range(rounds):
        for way, per_second in rates.items():
            per_second.append(await _rate(way, seconds))
    per_s = [statistics.median(rates[way]) for way in (direct, http)]
    shown = {"clients": str(CLIENTS), "direct": per_s[0], "gateway": per_s[1], "share": per_s[1] / per_s[0]}
    return rows, shown


async def _rate(way: Way, seconds: float) -> float:
    """Embeddings a second, with `CLIENTS` requests open all the time."""
    end, count = time.perf_counter() + seconds, 0

    async def loop() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await way.embed()
            count += 1

    await asyncio.gather(*(loop() for _ in range(CLIENTS)))
    return count / seconds
