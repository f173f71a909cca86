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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.common.cells import Cells, Run
from bench.common.front_variants import ENGINES, publish_with_template
from bench.common.output import BUILD, FOLDER, Output, Row, empty, parser, program
from bench.common.server import loaded_server
from bench.common.texts import HttpServer, Outcome, TextBench, TritonModel
from shapeshift.cli.gateway import child
from shapeshift.engines import manifest
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.triton.embedded.free_ports import free_ports

DIRECT, GATEWAY = "direct", "gateway"
CLIENTS = (1, 32)
_PROMPT, _TOKENS, _STREAMS = "Once upon a time", 64, 5
_STREAM, _CHAT = "one stream at a time", "one chat with tools at a time"
# The gateway looks for the reasoning and the calls that a template shows.
_TOOLS_MODEL = "generate_tools"
_TEMPLATE = """{{ tools | tojson }}
To call a tool: <tool_call>{"name": ..., "arguments": ...}</tool_call>{# <think></think> #}
{{ messages[0].content }}"""
_CONVERSATION: dict[str, Any] = {
    "model": _TOOLS_MODEL,
    "messages": [{"role": "user", "content": _PROMPT}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
}
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
    repository = FOLDER / "gateway"
    empty(repository)
    publish_with_template("generate", _TOOLS_MODEL, _TEMPLATE, repository)
    engines = {"encode": len(manifest.load(ENGINES).engines), "generate": 0, _TOOLS_MODEL: 0}
    with running(engines, repository) as (grpc, http):
        bench.closed([TritonModel(DIRECT, grpc, "encode"), HttpServer(GATEWAY, http, "encode")], CLIENTS)
        streams: Cells[list[list[float]]] = Cells(_stream_figures)

        def measure_streams(load: str, model: str, prompt: str, route: str, body: dict[str, Any]) -> None:
            ways = {
                DIRECT: lambda: asyncio.run(_direct_streams(grpc, model, prompt)),
                GATEWAY: lambda: asyncio.run(_http_streams(f"{http}/{route}", {"model": model, **body})),
            }
            streams.measure(load, ways, 2 * rounds)

        measure_streams(_STREAM, "generate", _PROMPT, "completions", {"prompt": _PROMPT})
        measure_streams(_CHAT, _TOOLS_MODEL, _rendered(http), "chat/completions", _CONVERSATION)
    output.say(bench.cells.tables("embeddings, ") + streams.tables())
    rows = [
        _added(bench.cells, "closed 1", "p50_ms"),
        *(_added(streams, load, name) for load in (_STREAM, _CHAT) for name in ("first_ms", "between_ms")),
        _added(bench.cells, f"closed {CLIENTS[1]}", "per_second"),
    ]
    output.table("what the gateway adds", rows)
    output.data["gateway"] = rows


@contextmanager
def running(engines: Mapping[str, int], *more: Path) -> Iterator[tuple[str, str]]:
    """The gRPC address of a server with the models in `engines` (name: number of engines), which are built or lie in
    the repositories `more`, and the URL of its gateway, which lists them. Raises ShapeshiftError where that takes
    longer than five minutes."""
    with loaded_server(engines, (BUILD / "repository", *more)) as server:
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


def _rendered(url: str) -> str:
    """The prompt that the gateway makes of the conversation."""
    content, head = json.dumps(_CONVERSATION).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.removesuffix('/v1')}/apply-template", content, head)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        return str(json.load(answer)["prompt"])


async def _direct_streams(address: str, model: str, prompt: str) -> list[list[float]]:
    """Seconds from each request to its pieces, over gRPC, through the client that the gateway has."""
    client, times = AsyncClient(address), []
    inputs = {
        "text_input": np.array([prompt.encode()], dtype=object),
        "stream": np.array([True]),
        "max_tokens": np.array([_TOKENS], np.int32),
        "temperature": np.array([0], np.float32),
        "ignore_eos": np.array([True]),
    }
    for _ in range(_STREAMS):
        start = time.perf_counter()
        call = ModelCall(model, inputs, _TIMEOUT_S)
        times.append([time.perf_counter() - start async for _ in client.stream(call)])
    await client.close()
    return times


async def _http_streams(url: str, fields: Mapping[str, Any]) -> list[list[float]]:
    """The same over HTTP, by sockets alone: a client's library takes about as long as the gateway."""
    place = urlsplit(url)
    body = {**fields, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    content, times = json.dumps(body).encode(), []
    head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(content)}\r\n"
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
    # Some pieces have no text, and some texts of two tokens are one piece.
    between = [(pieces[-1] - pieces[0]) / (_TOKENS - 1) for pieces in run.result]
    return {"first_ms": 1e3 * float(np.median(first)), "between_ms": 1e3 * float(np.median(between))}


def _added(cells: Cells[Outcome] | Cells[list[list[float]]], load: str, name: str) -> Row:
    direct, gateway = (cells.figure(load, way, name) for way in (DIRECT, GATEWAY))
    row = {"of": f"{load}: {name}", DIRECT: direct, GATEWAY: gateway}
    return row | {"added": gateway - direct, "share": gateway / direct}


if __name__ == "__main__":
    sys.exit(main())
