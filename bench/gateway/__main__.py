"""`make bench BENCH=gateway`: what the gateway adds to a request that goes to the server over gRPC.

Gateway, server and clients share the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np

from bench.common.cells import Cells, Run
from bench.common.front_variants import ENGINES
from bench.common.output import BUILD, Output, Row, parser, program
from bench.common.server import loaded_server
from bench.common.texts import HttpServer, Outcome, TextBench, TritonModel
from shapeshift.cli.gateway import child
from shapeshift.engines import manifest
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.triton.embedded.free_ports import free_ports

DIRECT, GATEWAY = "direct", "gateway"
CLIENTS = (1, 32)
_PROMPT, _TOKENS, _STREAMS = "Once upon a time", 64, 20
_READY_S, _TIMEOUT_S = 300.0, 600.0


@program
def main() -> int:
    """Measure, print, and write the tables and data to build/bench/."""
    options = parser("gateway", __doc__, "fewer requests").parse_args()
    requests, rounds = (200, 3) if options.quick else (1000, 5)
    output = Output("gateway", {"requests": requests, "rounds": rounds})
    measure(output, TextBench(options.seed, requests, rounds), rounds)
    output.save()
    return 0


def measure(output: Output, bench: TextBench, rounds: int) -> None:
    """Embeddings of one client and of 32, and streams one at a time: direct, and through the gateway."""
    with running({"encode": len(manifest.load(ENGINES).engines), "generate": 0}) as (grpc, http):
        bench.closed([TritonModel(DIRECT, grpc, "encode"), HttpServer(GATEWAY, http, "encode")], CLIENTS)
        streams: Cells[list[list[float]]] = Cells(_stream_figures)
        ways = {
            DIRECT: lambda: asyncio.run(_direct_streams(grpc)),
            GATEWAY: lambda: asyncio.run(_http_streams(http)),
        }
        streams.measure("one stream at a time", ways, rounds)
    output.say(bench.cells.tables("embeddings, ") + streams.tables())
    rows = [
        _added(bench.cells, "closed 1", "p50_ms"),
        *(_added(streams, "one stream at a time", name) for name in ("first_ms", "between_ms")),
        _added(bench.cells, f"closed {CLIENTS[1]}", "per_second"),
    ]
    output.table("what the gateway adds", rows)
    output.data["gateway"] = rows


@contextmanager
def running(engines: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The gRPC address of a server with the models in `engines` (name: number of engines), and the URL of its gateway,
    which lists them. Raises ShapeshiftError where that takes longer than five minutes."""
    with loaded_server(engines, (BUILD / "repository",)) as server:
        port = next(iter(free_ports()))
        with child(server.settings, port) as gateway:
            gateway.start()
            url, end = f"http://127.0.0.1:{port}/v1", time.monotonic() + _READY_S
            while not engines.keys() <= _listed(url):
                if time.monotonic() > end:
                    raise ShapeshiftError(f"{url} does not list {', '.join(engines)} after {_READY_S:g} s")
                time.sleep(0.2)
            yield server.grpc_url, url


def _listed(url: str) -> set[str]:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
        return {one["id"] for one in json.load(answer)["data"]}
    return set()


async def _direct_streams(address: str) -> list[list[float]]:
    """Seconds from each request to its pieces, over gRPC, through the client that the gateway has."""
    client, times = AsyncClient(address), []
    inputs = {
        "text_input": np.array([_PROMPT.encode()], dtype=object),
        "stream": np.array([True]),
        "max_tokens": np.array([_TOKENS], np.int32),
        "ignore_eos": np.array([True]),
    }
    for _ in range(_STREAMS):
        start = time.perf_counter()
        call = ModelCall("generate", inputs, _TIMEOUT_S)
        times.append([time.perf_counter() - start async for _ in client.stream(call)])
    await client.close()
    return times


async def _http_streams(url: str) -> list[list[float]]:
    """The same over HTTP, by sockets alone: a client's library takes about as long as the gateway."""
    place = urlsplit(url)
    body = {"model": "generate", "prompt": _PROMPT, "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
    content, times = json.dumps(body).encode(), []
    head = f"POST {place.path}/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(content)}\r\n"
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    for _ in range(_STREAMS):
        start = time.perf_counter()
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        status, pieces = await reader.readline(), []
        if status.split()[1] != b"200":
            raise ShapeshiftError(f"{url}: {status.decode().strip()}")
        # The last chunk is empty, and so is the line behind it.
        while (line := await reader.readline()) != b"0\r\n":
            if line.startswith(b"data: {"):
                pieces.append(time.perf_counter() - start)
        await reader.readline()
        times.append(pieces)
    writer.close()
    return times


def _stream_figures(run: Run[list[list[float]]]) -> dict[str, float]:
    first = [pieces[0] for pieces in run.result]
    between = [(pieces[-1] - pieces[0]) / max(1, len(pieces) - 1) for pieces in run.result]
    return {"first_ms": 1e3 * float(np.median(first)), "between_ms": 1e3 * float(np.median(between))}


def _added(cells: Cells[Outcome] | Cells[list[list[float]]], load: str, name: str) -> Row:
    direct, gateway = (cells.figure(load, way, name) for way in (DIRECT, GATEWAY))
    row = {"of": f"{load}: {name}", DIRECT: direct, GATEWAY: gateway}
    return row | {"added": gateway - direct, "share": gateway / direct}


if __name__ == "__main__":
    sys.exit(main())
