"""What the sidecar does for many nodes: scrape, read the models, solve and decide; against stub nodes."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from bench.common.output import FOLDER, Output, progress
from bench.fleet.stub_nodes import FRONT
from shapeshift.fleet import settings
from shapeshift.fleet.membership import open_membership
from shapeshift.fleet.node import Node
from shapeshift.fleet.sidecar.connections import FleetConnections
from shapeshift.fleet.sidecar.fleet import servers_of
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage, traffic_of
from shapeshift.sidecar.policy import decide, plan
from shapeshift.sidecar.policy.decide import Decision
from shapeshift.sidecar.policy.pools import FrontPeriod
from shapeshift.sidecar.servers import Servers
from shapeshift.sidecar.workers import ServerModels
from shapeshift.triton.endpoint import Endpoint

T = TypeVar("T")

_WORKERS = 10
_SIZES, _QUICK_SIZES = (10, 30, 100), (10, 100)
_ROUNDS, _QUICK_ROUNDS = 20, 5
# The first three are the work of a round that plans; the last one is done at the start, and before each plan.
STEPS = ("scrape", "read models", "solve, decide", "read configs")


def measure(output: Output, quick: bool) -> None:
    """Print one row for each number of nodes, with ten workers each."""
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    output.say(f"\nthe sidecar over stub nodes with {_WORKERS} workers each; ms, median of {rounds} rounds")
    head = "".join(f"{name:>15}" for name in (*STEPS, "sum of 3", "longest sum", "own CPU of it"))
    output.say(f"  {'nodes':>6}{'workers':>9}{head}{'MiB':>7}")
    rows = []
    for nodes in _QUICK_SIZES if quick else _SIZES:
        progress(f"control: {nodes} nodes")
        with stub_nodes(nodes) as servers:
            row = measured(servers, nodes, rounds)
        rows.append(row)
        times = "".join(f"{row[name]:15.0f}" for name in (*STEPS, "sum", "longest sum", "cpu"))
        output.say(f"  {nodes:6}{nodes * _WORKERS:9}{times}{row['mib']:7.0f}")
    output.say("  sum of 3: without `read configs`; MiB: the most that the process used, solver and libraries included")
    output.data["control"] = rows


def measured(servers: Servers, nodes: int, rounds: int) -> dict[str, float]:
    """A row of the table: milliseconds by step, and memory."""
    scrape, reader = servers.scrape, servers.reader
    plan.warm_up()
    before = scrape()
    reader.read()
    times: dict[str, list[float]] = {step: [] for step in STEPS}
    cpu = []
    for _ in range(rounds):
        # The counters move once a second.
        time.sleep(1.0)
        start = time.process_time()
        page = _timed(scrape, times["scrape"])
        server = _timed(reader.read, times["read models"])
        _timed(partial(_decide, server, before, page), times["solve, decide"])
        cpu.append((time.process_time() - start) * 1e3)
        reader.forget()
        found = _timed(reader.read, times["read configs"])
        assert len(found.workers[FRONT]) == nodes * _WORKERS
    sums = [sum(parts) for parts in zip(*(times[step] for step in STEPS[:3]), strict=True)]
    return {
        "nodes": nodes,
        **{step: statistics.median(times[step]) for step in STEPS},
        "sum": statistics.median(sums),
        "longest sum": max(sums),
        "cpu": statistics.median(cpu),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _decide(server: ServerModels, old: MetricsPage, new: MetricsPage) -> Decision:
    front, workers = server.fronts[FRONT], server.workers[FRONT]
    current = {worker.name: worker.bin for worker in workers}
    period = FrontPeriod(front, current, [], traffic_of(front.models, old, new), len(workers))
    ((_, decision),) = decide.decide_group([period])
    return decision


def _timed(call: Callable[[], T], times: list[float]) -> T:
    start = time.perf_counter()
    found = call()
    times.append((time.perf_counter() - start) * 1e3)
    return found


@contextmanager
def stub_nodes(nodes: int) -> Iterator[Servers]:
    """So many stub nodes, which another process runs."""
    command = [sys.executable, "-m", "bench.fleet.stub_nodes", str(nodes), str(_WORKERS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        ports = json.loads(process.stdout.readline())
        pairs = enumerate(zip(ports["grpc"], ports["metrics"], strict=True))
        listed = [
            Node(f"n{number:03d}", Endpoint(f"127.0.0.1:{grpc}"), f"http://127.0.0.1:{metrics}/metrics")
            for number, (grpc, metrics) in pairs
        ]
        FOLDER.mkdir(parents=True, exist_ok=True)
        file = FOLDER / "stub_fleet.toml"
        file.write_text(settings.text("stubs", None, listed))
        journal = Journal(lambda text: None, lambda report: None, {})
        # Longer than the sidecar's: what is measured is the time, not who is late.
        yield servers_of(FleetConnections(open_membership(file), journal), journal, limit_s=60.0)
        process.stdin.close()
