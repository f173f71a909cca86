"""A bench counts requests that are refused; none of them ends it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from aiohttp import web

from bench.common import systems
from bench.common.systems import Outcome, TritonModel
from bench.common.text_bench import TextBench, TextScale
from bench.encode import report
from bench.peers import http_load
from client.open_loop import INFER

T = TypeVar("T")


async def over_http(run: Callable[[str], Awaitable[T]]) -> T:
    """What `run` returns of the URL of a server that refuses every other request."""
    numbers = itertools.count()

    async def embed(request: web.Request) -> web.Response:
        return web.json_response({}, status=503 if next(numbers) % 2 else 200)

    app = web.Application()
    app.router.add_post("/embeddings", embed)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        return await run(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_refusals_over_http_are_counted(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    monkeypatch.setattr(http_load, "_PAUSE_S", 0.0)

    async def run(url: str) -> http_load.Load:
        if loop == "closed":
            return await http_load.closed_loop(url, ["a"], 2, count=10)
        return await http_load.open_loop(url, ["a"], [0.0] * 10)

    load = asyncio.run(over_http(run))
    assert (len(load.latencies), load.failed) == (5, 5)
    assert load.rate > 0 and not np.isnan(load.latencies).any()


def test_refusals_of_triton_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "_PAUSE_S", 0.0)
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
        lines = report.tables(bench, "f32", {"short": 100.0}).splitlines()
    (row,) = [line for line in lines if line.startswith(f"  {report.STATIC} ") and "nan" in line][:1]
    assert row.split()[-2] == "3"
    assert any(line.split()[-1] == "inf" for line in lines if "throughput over ST" in line)
