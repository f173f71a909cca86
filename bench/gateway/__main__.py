"""`make bench BENCH=gateway`: what the gateway adds to a request, and infinity's API beside it.

One keep-alive connection for each client, with requests made once. The direct gRPC path and the gateway take turns, so
that other load on the machine meets both; the gateway, the server and the clients share the cores.

--parts chooses: added (the default), infinity (which makes an environment of its own first: minutes).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from bench.common.output import BUILD, FOLDER, Output, Row, name_of_parts, program
from bench.common.server import running_server
from bench.gateway import infinity
from bench.gateway.ways import DirectWay, HttpWay, Way
from shapeshift.cli.gateway import child
from shapeshift.triton.embedded.free_ports import free_ports

USUAL = ("added",)
CLIENTS = 32


@program
def main() -> int:
    """Measure, print, and write the tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--parts", nargs="+", choices=(*USUAL, "infinity"), default=USUAL)
    options = parser.parse_args()
    requests, rounds, seconds = (200, 3, 2.0) if options.quick else (1000, 5, 5.0)
    settings = {"requests": requests, "rounds": rounds, "clients": CLIENTS, "parts": " ".join(options.parts)}
    output = Output("gateway", settings, name_of_parts("gateway", options.parts, USUAL))
    if "added" in options.parts:
        measure(output, requests, rounds, seconds)
    if "infinity" in options.parts:
        infinity.measure(output, requests, rounds)
    output.save()
    return 0


def measure(output: Output, requests: int, rounds: int, seconds: float) -> None:
    """The part `added`, on a server of its own."""
    with running_server(("encode", "generate"), (BUILD / "repository",), FOLDER / "run") as server:
        port = next(iter(free_ports()))
        with child(server.settings, port) as gateway, asyncio.Runner() as runner:
            gateway.start()
            direct, http = DirectWay(server.grpc_url), HttpWay(f"127.0.0.1:{port}")
            runner.run(http.wait_ready())
            rows, rate = runner.run(measured(direct, http, requests, rounds, seconds))
    output.table("one client", rows)
    output.table("embeddings/s, median of rounds", [rate])
    output.data["gateway"] = [*rows, rate]


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


if __name__ == "__main__":
    sys.exit(main())
