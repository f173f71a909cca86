"""Answers a second of router fronts whose workers take no time: one front, two, and four, and where the time goes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.common.output import Output
from bench.fleet.nodes import Nodes, build_fronts, running_nodes
from client import perf_analyzer

_FRONT = "encode"
_NODES = ("a", "b", "c", "d")
_CLIENTS = 32
_TENSORS = {"INPUT_IDS": list(range(101, 117)), "ATTENTION_MASK": [1] * 16}
_INPUTS = [{name: {"content": values, "shape": [len(values)]} for name, values in _TENSORS.items()}]
_TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")


def measure(output: Output, quick: bool) -> None:
    """Each number of fronts in turn, each front on a node of its own; every front uses the workers of all nodes."""
    rounds, requests = (1, 4000) if quick else (3, 20000)
    build_fronts([_FRONT])
    output.say(f"\nworkers without latency on {len(_NODES)} nodes; {_CLIENTS} clients, {requests} texts a round")
    with running_nodes(dict.fromkeys(_NODES, (_FRONT, f"{_FRONT}_w00"))) as nodes:
        for node in _NODES:
            nodes.wait_joined(node, _FRONT, len(_NODES))
        stages = _processes(nodes)
        found: dict[int, list[float]] = {1: [], 2: [], 4: []}
        for _ in range(rounds):
            for fronts, per_second in found.items():
                before = _spent_ms(stages)
                per_second.append(_answers_per_s(nodes, _NODES[:fronts], requests))
                spent = _spent_ms(stages) - before
                # The warm-up is a tenth more.
                shares = ", ".join(f"{stage} {spent[stage] / requests / 1.1:.2f}" for stage in sorted(spent))
                output.say(f"  {fronts} fronts: {per_second[-1]:.0f} answers/s; processor ms an answer: {shares}")
    one = float(np.median(found[1]))
    for fronts, per_second in found.items():
        output.say(
            f"  {fronts} fronts, median: {np.median(per_second):.0f}/s, {np.median(per_second) / one:.2f} of one"
        )
    output.data["router_fronts"] = found


def _answers_per_s(nodes: Nodes, fronts: Sequence[str], requests: int) -> float:
    """Of all fronts together, loaded at once."""

    def load(node: str) -> float:
        url, share = nodes.servers[node].grpc_url, len(fronts)
        measured = perf_analyzer.measure(url, _FRONT, _INPUTS, _CLIENTS // share, requests // share, timeout_s=60.0)
        return measured.per_second

    with ThreadPoolExecutor(len(fronts)) as pool:
        return sum(pool.map(load, fronts))


def _processes(nodes: Nodes) -> dict[str, list[int]]:
    """The processes of each stage of a request."""
    found: dict[str, list[int]] = {"server": [server.pid for server in nodes.servers.values()]}
    for node in nodes.servers:
        for (name, labels), _ in nodes.samples(node).items():
            if name == "shapeshift_heartbeat_total":
                own = dict(labels)
                found.setdefault("front" if own["model"] == _FRONT else "worker", []).append(int(own["pid"]))
    return found


def _spent_ms(stages: dict[str, list[int]]) -> Counter[str]:
    """The processor time of each stage so far."""
    return Counter({stage: round(sum(_processor_ms(pids))) for stage, pids in stages.items()})


def _processor_ms(pids: Iterable[int]) -> Iterable[float]:
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        yield (int(fields[11]) + int(fields[12])) * _TICK_MS
