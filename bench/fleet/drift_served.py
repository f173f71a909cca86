"""The comparison of `drift` on real servers, routers and sidecars, over emulated workers that are slowed down."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common.foreign_load import ForeignLoad
from bench.common.output import Output, empty, progress
from bench.fleet.nodes import WORK_FOLDER, Nodes, running_nodes
from bench.polymorph.emulated_server import SLO_MS, edges
from bench.polymorph.fleet import emulated_front, read_curve, running_fleet
from bench.polymorph.schemes import OURS
from bench.polymorph.traces import Traffic, capacity_per_s, draw, planned
from client.open_loop import PlannedRequest, replay

_FRONT = "encode"
_NODES, _WORKERS = ("a", "b", "c"), 8
# Two cores carry the requests of 24 workers that are so many times as slow; results are divided by it.
_SLOWER = 10.0
_PERIOD_S, _TIMEOUT_S = 60.0, 300.0


def measure(output: Output, quick: bool) -> None:
    """Both ways in turn, with the same requests at the same nodes."""
    traffic = Traffic(0.7, drift=0.1, drift_s=240.0, duration_s=120.0 if quick else 480.0)
    at_s, tokens = draw(traffic, capacity_per_s(read_curve(), edges(), len(_NODES) * _WORKERS) / _SLOWER, 0)
    node_of = np.random.default_rng(0).integers(0, len(_NODES), len(at_s))
    requests = {
        node: planned(at_s[node_of == number], tokens[node_of == number], number) for number, node in enumerate(_NODES)
    }
    output.say(
        f"\nserved: {len(_NODES)} nodes with {_WORKERS} emulated workers each, {_SLOWER:g} times as slow, {traffic}; ms"
    )
    rows = {}
    for name, servers in {"one for all": _together, "each for itself": _apart}.items():
        progress(f"drift_served: {name}")
        with servers(tokens) as urls, ForeignLoad() as foreign:
            latencies, failed = asyncio.run(_replayed(urls, requests))
        p98 = float(np.percentile(latencies, 98))
        rows[name] = {"mean_ms": float(latencies.mean()), "p98_ms": p98, "requests": len(at_s), "failed": failed}
        shown = f"mean {latencies.mean():.1f}, p98 {p98:.1f}, {len(at_s)} requests, {failed} failed"
        output.say(f"  {name:16} {shown}; other programs used {foreign.cores:.2f} cores")
    output.say(f"  ratio of p98: {rows['one for all']['p98_ms'] / rows['each for itself']['p98_ms']:.2f}")
    output.data["drift_served"] = rows


async def _replayed(
    urls: Mapping[str, str], requests: Mapping[str, Sequence[PlannedRequest]]
) -> tuple[NDArray[np.float64], int]:
    reports = await asyncio.gather(
        *(replay(url, _FRONT, requests[node], timeout_s=_TIMEOUT_S, drain_s=_TIMEOUT_S) for node, url in urls.items())
    )
    latencies = np.concatenate([report.latency_s[report.ok] for report in reports]) * 1e3 / _SLOWER
    return latencies, sum(int((~report.ok).sum()) for report in reports)


def _build(folder: Path, tokens: NDArray[np.int64]) -> Path:
    stated = {
        "bins": ",".join(map(str, edges())),
        "time_scale": f"{_SLOWER:g}",
        "slo_ms": f"{SLO_MS * _SLOWER:g}",
        "workers": _WORKERS,
        "min_workers": _WORKERS,
        "queue_rows": 100000,
        "queue_tokens": 10000000,
        "max_queue_ms": 0,
        **OURS.parameters(),
    }
    return emulated_front(folder, _FRONT, tokens.tolist(), **stated)


@contextmanager
def _apart(tokens: NDArray[np.int64]) -> Iterator[Mapping[str, str]]:
    """Three servers that know nothing of one another, each with its own sidecar."""
    empty(WORK_FOLDER)
    with ExitStack() as stack:
        urls = {}
        for node in _NODES:
            folder = WORK_FOLDER / node
            repository = _build(folder, tokens)
            running = stack.enter_context(running_fleet(folder, (repository,), {_FRONT: _WORKERS}, _PERIOD_S))
            urls[node] = running.server.grpc_url
        yield urls


@contextmanager
def _together(tokens: NDArray[np.int64]) -> Iterator[Mapping[str, str]]:
    """The nodes of a fleet with one sidecar."""
    empty(WORK_FOLDER)
    repository = _build(WORK_FOLDER, tokens)
    with running_nodes(dict.fromkeys(_NODES, (_FRONT,))) as nodes, _sidecar(nodes, repository):
        for node in _NODES:
            nodes.wait_joined(node, _FRONT, len(_NODES) * _WORKERS)
        yield {node: server.grpc_url for node, server in nodes.servers.items()}


@contextmanager
def _sidecar(nodes: Nodes, repository: Path) -> Iterator[None]:
    file = WORK_FOLDER / "sidecar.toml"
    nodes.write_for_sidecar(file)
    command = [
        sys.executable,
        "-m",
        "shapeshift.cli.main",
        "sidecar",
        "--fleet",
        str(file),
        "--build",
        str(WORK_FOLDER),
    ]
    command += ["--plan-period", f"{_PERIOD_S:g}", "--repository", str(repository)]
    with (WORK_FOLDER / "sidecar.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()
