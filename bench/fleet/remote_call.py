"""What a worker on another node costs: one request at a time, by turns to a front with each kind of worker."""

from __future__ import annotations

import numpy as np

from bench.common.output import Output
from bench.fleet.nodes import build_fronts, running_nodes
from client import perf_analyzer

# The front `near` has its only worker on its own node `a`, `far` on the node `b`.
_MODELS = {"a": ("near", "near_w00", "far"), "b": ("far_w00",)}
_TEXT = [{"TEXT": ["A text of some tokens, neither short nor long, and always the same one."]}]


def measure(output: Output, quick: bool) -> None:
    """The median of each kind, and their difference, by round."""
    rounds, requests = (3, 300) if quick else (9, 1000)
    build_fronts(("near", "far"))
    medians: dict[str, list[float]] = {"near": [], "far": []}
    with running_nodes(_MODELS) as nodes:
        for front in medians:
            nodes.wait_joined("a", front, 1)
        for _ in range(rounds):
            for front, found in medians.items():
                url = nodes.servers["a"].grpc_url
                latency_ms = perf_analyzer.measure(url, front, _TEXT, 1, requests, timeout_s=120.0).latency_ms
                found.append(float(np.median(latency_ms)))
    added = np.subtract(medians["far"], medians["near"])
    output.say(f"\nrequests of one text, one at a time, workers without latency; p50 of {requests}, {rounds} rounds")
    for front, what in (("near", "worker on the front's node"), ("far", "worker on another node")):
        output.say(f"  {what}: {np.median(medians[front]):.2f} ms")
    output.say(f"  remote call minus local call: {np.median(added):.2f} ms ({added.min():.2f} to {added.max():.2f})")
    output.data["remote_call"] = {**medians, "added_ms": added.tolist()}
