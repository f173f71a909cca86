"""A bench counts requests that are refused; none of them ends it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from aiohttp import web

from bench.common.cells import Cells, Run
from bench.common.texts import HttpServer, Outcome, TritonModel, figures
from bench.encode import __main__ as encode
from client.open_loop import INFER


def test_refusals_over_http_are_counted_and_a_server_of_several_models_is_told_which() -> None:
    """A server that refuses every other request."""
    bodies: list[dict[str, object]] = []

    async def embed(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({}, status=200 if len(bodies) % 2 else 503)

    app = web.Application()
    app.router.add_post("/embeddings", embed)
    with running(app) as url:
        outcome = HttpServer("ours", url, "encode").closed(["a"], 2, 10)
    assert (len(outcome.latency_ms), outcome.failed) == (5, 5)
    assert outcome.per_second > 0 and not np.isnan(outcome.latency_ms).any()
    assert bodies[0] == {"model": "encode", "input": ["a"], "encoding_format": "base64"}


@contextmanager
def running(app: web.Application) -> Iterator[str]:
    """The URL of a server on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_refusals_of_triton_are_counted() -> None:
    numbers = itertools.count()

    def infer(request: bytes, context: Any) -> bytes:
        # The first one is not measured.
        if next(numbers) % 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "max_queue_ms: an answer is predicted after 31000 ms")
        return b""

    _, service, method = INFER.split("/")
    handler = grpc.unary_unary_rpc_method_handler(infer)
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        outcome = TritonModel("ours", f"127.0.0.1:{port}", "encode").closed(["a"], 2, 10)
        server.stop(None)
    assert (len(outcome.latency_ms), outcome.failed) == (5, 5)
    assert outcome.per_second > 0 and outcome.latency_ms.min() > 0


def test_a_baseline_that_answers_nothing_has_a_row() -> None:
    cells = Cells(figures)
    for name in (encode.OURS, encode.DYNAMIC, encode.STATIC):
        answered = name != encode.STATIC
        outcome = Outcome(np.full(3, 1.0), 9.0) if answered else Outcome(np.array([]), 0.0, failed=3)
        cells.runs["closed 8", name] = [Run(outcome, 1.0, 1.0)]
    with np.errstate(divide="ignore"):
        rows = {row["over"]: row for row in encode.ratios(cells)}
        text = cells.tables()
    assert rows[encode.STATIC]["per_second"] == np.inf and rows[encode.DYNAMIC]["p98_ms"] == 1.0
    assert [line.split()[1:8] for line in text.splitlines() if line.startswith(f"  {encode.STATIC} ")] == [
        [*("1", "0", "nan", "nan", "nan", "nan", "3")]
    ]
