"""What the gateway adds to a request, beside the direct gRPC path.

One keep-alive connection for each client, with requests made once. The two ways take turns, so that other load on the
machine meets both; the gateway, the server and the clients share the cores.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from bench.gateway.ways import Way

CLIENTS = 32


async def measured(
    direct: Way, http: Way, requests: int, rounds: int, seconds: float
) -> tuple[list[str], dict[str, list[float]]]:
    """The table, and its numbers by name: [direct, through the gateway]."""
    lines = ["one client, p50 in ms              direct   gateway     added"]
    data: dict[str, list[float]] = {}
    one: dict[str, Callable[[Way], Awaitable[tuple[float, ...]]]] = {
        "embedding": lambda way: way.embed(),
        "first token, between tokens": lambda way: way.generate(),
    }
    for name, ask in one.items():
        found: dict[Way, list[tuple[float, ...]]] = {direct: [], http: []}
        for _ in range(requests if name == "embedding" else requests // 10):
            for way, own in found.items():
                own.append(await ask(way))
        for place, part in enumerate(name.split(", ")):
            own_ms = [statistics.median(values[place] for values in found[way]) * 1e3 for way in (direct, http)]
            lines.append(f"  {part:30}{own_ms[0]:9.2f}{own_ms[1]:10.2f}{own_ms[1] - own_ms[0]:10.2f}")
            data[part] = own_ms
    per_s: dict[Way, list[float]] = {direct: [], http: []}
    for _ in range(rounds):
        for way, rates in per_s.items():
            rates.append(await _rate(way, seconds))
    own_rate = [statistics.median(per_s[way]) for way in (direct, http)]
    lines.append(f"\n{CLIENTS} clients, embeddings/s         direct   gateway     share")
    lines.append(f"  {'median of rounds':30}{own_rate[0]:9.0f}{own_rate[1]:10.0f}{own_rate[1] / own_rate[0]:10.2f}")
    data["per_s"] = own_rate
    return lines, data


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
