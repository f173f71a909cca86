"""What a worker on another node costs: requests by turns to a front with each kind of worker, one at a time."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from numpy.typing import NDArray

from bench.common.output import Output
from bench.fleet.nodes import Nodes, build_fronts, running_nodes
from shapeshift.triton.async_client import AsyncClient, ModelCall

# The front `near` has its only worker on its own node `a`, `far` on the node `b`.
_MODELS = {"a": ("near", "near_w00", "far"), "b": ("far_w00",)}
_IDS = np.arange(101, 117)[None]
_PERCENTILES = (10, 50, 98)


def measure(output: Output, quick: bool) -> None:
    """Percentiles of each kind, and the median of the differences of neighbours: in plain text, and with mutual TLS."""
    requests = 2000 if quick else 10000
    build_fronts(("near", "far"))
    output.say(f"\nrequests of one text, one at a time, workers without latency; {requests} of each kind, by turns")
    for secured in (False, True):
        with running_nodes(_MODELS, secured) as nodes:
            for front in ("near", "far"):
                nodes.wait_joined("a", front, 1)
            took_ms = asyncio.run(_by_turns(nodes, requests))
        _show(output, "mutual TLS" if secured else "plain text", took_ms)


def _show(output: Output, link: str, took_ms: NDArray[np.float64]) -> None:
    output.say(f"  {link}")
    for what, column in zip(("worker on the front's node", "worker on another node"), took_ms.T, strict=True):
        shown = ", ".join(f"p{one} {np.percentile(column, one):.2f} ms" for one in _PERCENTILES)
        output.say(f"    {what}: {shown}")
    added = took_ms[:, 1] - took_ms[:, 0]
    by_percentile = {f"p{one}": float(np.subtract(*np.percentile(took_ms[:, ::-1], one, 0))) for one in _PERCENTILES}
    shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in by_percentile.items())
    output.say(f"    remote call minus local call: {shown}; median of neighbours {np.median(added):.2f} ms")
    found = {"requests": len(took_ms), **by_percentile, "neighbours": float(np.median(added))}
    output.data.setdefault("remote_call", {})[link] = found


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
