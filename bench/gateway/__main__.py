"""`make bench BENCH=gateway`: what the gateway adds to a request, beside the direct gRPC path, in one run.

One keep-alive connection for each client, with requests made once. The two ways take turns, so that other load on the
machine meets both; the gateway, the server and the clients share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from bench.common.output import BUILD, FOLDER, Output
from bench.common.server import running_server
from bench.gateway.ways import DirectWay, HttpWay, Way
from shapeshift.cli.gateway import child
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.embedded.free_ports import free_ports

CLIENTS = 32
Measure = Callable[[Way], Awaitable[float]]


def main() -> int:
    """Measure, print, and write the table and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    options = parser.parse_args()
    requests, rounds, seconds = (200, 3, 2.0) if options.quick else (1000, 5, 5.0)
    try:
        output = Output("gateway", {"requests": requests, "rounds": rounds, "clients": CLIENTS})
        with running_server(("encode", "generate"), (BUILD / "repository",), FOLDER / "run") as server:
            port = next(iter(free_ports()))
            with child(server.settings, port) as gateway:
                gateway.start()
                direct, http = DirectWay(server.grpc_url), HttpWay(urlsplit(f"http://127.0.0.1:{port}").netloc)
                lines, data = asyncio.run(_all(direct, http, requests, rounds, seconds))
    except ShapeshiftError as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 2
    output.say("\n".join(lines))
    output.data["gateway"] = data
    output.save()
    return 0


async def _all(
    direct: Way, http: Way, requests: int, rounds: int, seconds: float
) -> tuple[list[str], dict[str, list[float]]]:
    await http.wait_ready()
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


if __name__ == "__main__":
    sys.exit(main())
