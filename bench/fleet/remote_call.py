"""What a worker on another node costs: requests by turns to a front with each kind of worker, one at a time."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from numpy.typing import NDArray

from bench.common.output import Output, Row
from bench.fleet.nodes import Nodes, build_fronts, running_nodes
from shapeshift.triton.async_client import AsyncClient, ModelCall

# The front `near` has its only worker on its own node `a`, `far` on the node `b`.
_MODELS = {"a": ("near", "near_w00", "far"), "b": ("far_w00",)}
_IDS = np.arange(101, 117)[None]
_FRONTS = ("near, on the front's node", "far, on another node")
_PERCENTILES = (10, 50, 98)


def measure(output: Output, quick: bool) -> None:
    """Percentiles of each kind, and the median of the differences of neighbours: in plain text, and with mutual TLS."""
    requests = 2000 if quick else 10000
    build_fronts(("near", "far"))
    rows: list[Row] = []
    for secured in (False, True):
        with running_nodes(_MODELS, secured) as nodes:
            for front in ("near", "far"):
                nodes.wait_joined("a", front, 1)
            took_ms = asyncio.run(_by_turns(nodes, requests))
        link = "mutual TLS" if secured else "plain text"
        for what, ms in (*zip(_FRONTS, took_ms.T, strict=True), ("far minus near", took_ms[:, 1] - took_ms[:, 0])):
            percentiles = {f"p{one}": float(np.percentile(ms, one)) for one in _PERCENTILES}
            rows.append({"link": link, "worker": what, **percentiles})
    title = f"ms of one text, one at a time, workers without latency; {requests} to each front, by turns"
    output.table(title, rows)
    output.data["remote_call"] = {"requests": requests, "rows": rows}


async def _by_turns(nodes: Nodes, requests: int) -> NDArray[np.float64]:
    """Milliseconds of each request, [requests, near and far], after a warm-up of a tenth."""
    client = AsyncClient(nodes.servers["a"].grpc_url, nodes.tls)
    inputs = {"INPUT_IDS": _IDS, "ATTENTION_MASK": np.ones_like(_IDS)}
    took_ms = []
    for _ in range(requests // 10 + requests):
        pair = []
        for front in ("near", "far"):
            before = time.perf_counter()
            await client.infer(ModelCall(front, inputs, 30.0, ("EMBEDDING",)))
            pair.append((time.perf_counter() - before) * 1e3)
        took_ms.append(pair)
    await client.close()
    return np.array(took_ms[requests // 10 :])
