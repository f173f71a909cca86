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
import pytest
from aiohttp import web

from bench.common.systems import HttpServer, Outcome, TritonModel
from bench.common.text_bench import TextBench, TextScale
from bench.encode import __main__ as report
from client.open_loop import INFER


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_refusals_over_http_are_counted_and_a_server_of_several_models_is_told_which(loop: str) -> None:
    """A server that refuses every other request."""
    bodies: list[dict[str, object]] = []

    async def embed(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({}, status=200 if len(bodies) % 2 else 503)

    app = web.Application()
    app.router.add_post("/embeddings", embed)
    with running(app) as url:
        server = HttpServer("ours", url, "encode")
        outcome = server.closed(["a"], 2, 10) if loop == "closed" else server.open(["a"], np.zeros(10))
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
    assert outcome.per_second > 0 and outcome.percentile(98) > 0


def test_a_baseline_that_answers_nothing_has_a_row() -> None:
    scale = TextScale(1, 4, 0.0, (8,), ("short",), ())
    bench = TextBench(scale, seed=0)
    for load in ("perf_analyzer 1", "perf_analyzer 8", "closed 8"):
        for name in (report.OURS, report.IN_PROCESS, report.DYNAMIC, report.STATIC):
            answered = name != report.STATIC
            outcome = Outcome(np.full(3, 1.0), 9.0) if answered else Outcome(np.array([]), 0.0, failed=3)
            bench.outcomes["short", load, name] = [outcome]
            bench.own_ms["short", load, name] = bench.foreign["short", load, name] = [1.0]
    with np.errstate(divide="ignore"):
        rows = {row["of"]: row for row in report.ratios(bench)}
        text = report.tables(bench, {"short": 100.0})
    assert rows["short, closed 8, over ST: texts/s; p98"]["value"] == np.inf
    assert [line.split()[1:7] for line in text.splitlines() if line.startswith(f"  {report.STATIC} ")][0] == [
        *("1", "0", "nan", "nan", "nan", "3")
    ]
