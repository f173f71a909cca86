"""Adapter affinity against round robin over three nodes: simulated, with the server's policies.

Each request enters at one node, in turn. Its front knows its own work exactly; of another node it knows the work at the
last look, and what it has itself passed on there since. Passing a request on takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from bench.adapter_cache.loads import draw
from bench.adapter_cache.report import DEFAULT, WARM
from bench.adapter_cache.simulated import ACCURACY, PARTS, Regime, regimes
from bench.common.output import Output, Row, progress
from shapeshift.adapter_cache.policy.length_prediction import Oracle
from shapeshift.fleet.policy.placement import LOOK_S, least_unread
from shapeshift.simulate.adapter_cache import SimulatedRequest, SimulatedServer

NODES = ("a", "b", "c")
AFFINITY, ROUND_ROBIN = "affinity", "round robin"
# Of the capacity of one node without a cache, times the number of nodes.
_LOAD = 0.7

Choose = Callable[[SimulatedRequest, Mapping[str, float]], str]
"""choose(request, unread prompt tokens by node): the node that serves the request."""


def measure(output: Output, quick: bool) -> None:
    """Bytes loaded and the 99th percentile of the first token, by regime and rule; medians over seeds."""
    requests, seeds = (1500, (1,)) if quick else (6000, (1, 2, 3))
    rows: list[Row] = []
    for regime in regimes():
        rate = regime.capacity(requests // 3) * _LOAD * len(NODES)
        medians = {}
        for rule in (ROUND_ROBIN, AFFINITY):
            progress(f"{regime.name}, {rule}")
            runs = [run(regime, rule, rate, requests, seed) for seed in seeds]
            medians[rule] = loaded, p99_s = np.median(runs, axis=0).tolist()
            plain = medians[ROUND_ROBIN]
            row = {"scarce": regime.name, "rule": rule, "GiB loaded": loaded / 2**30, "p99 ms": p99_s * 1e3}
            rows.append({**row, "bytes, ratio": loaded / plain[0], "p99, ratio": p99_s / plain[1]})
    what = f"{len(NODES)} nodes, SIMULATED: 100 adapters, {requests} requests, load {_LOAD:.0%}; over round robin"
    output.table(what, rows)
    output.data["affinity"] = rows


def run(regime: Regime, rule: str, rate: float, requests: int, seed: int) -> tuple[float, float]:
    """Bytes loaded, and p99 of the first token in seconds. One seed gives all rules the same requests."""
    drawn = draw(regime.lengths, regime.adapters, rate, requests, np.random.default_rng(seed))
    system = PARTS[DEFAULT]
    caching = replace(system.caching, share=regime.share)
    longest = max(one.answer_tokens for one in drawn)
    servers = {
        name: SimulatedServer(
            regime.machine, regime.adapters, system.scheduler, caching, longest, Oracle(ACCURACY, seed)
        )
        for name in NODES
    }
    turns = count()
    rules: Mapping[str, Choose] = {
        ROUND_ROBIN: lambda request, unread: NODES[next(turns) % len(NODES)],
        AFFINITY: lambda request, unread: least_unread(str(request.adapter), unread),
    }
    loaded, first_s = serve(servers, drawn, rules[rule], LOOK_S)
    return loaded, float(np.percentile(first_s[int(requests * WARM) :], 99))


def serve(
    servers: Mapping[str, SimulatedServer], requests: Sequence[SimulatedRequest], choose: Choose, look_s: float
) -> tuple[float, NDArray[np.float64]]:
    """Serve `requests`, in order of arrival, to the end: bytes loaded, and seconds to the first token of each request.

    look_s: seconds between two looks at the work of another node.
    """
    names = list(servers)
    places: dict[str, list[int]] = {name: [] for name in names}
    seen = dict.fromkeys(names, 0.0)
    passed_on = {name: dict.fromkeys(names, 0.0) for name in names}
    looked_at = 0.0
    for place, request in enumerate(requests):
        for server in servers.values():
            server.advance(request.at_s)
        if request.at_s - looked_at >= look_s:
            looked_at = request.at_s
            seen = {name: float(server.unread_tokens) for name, server in servers.items()}
            passed_on = {name: dict.fromkeys(names, 0.0) for name in names}
        entry = names[place % len(names)]
        unread = {name: seen[name] + passed_on[entry][name] for name in names}
        unread[entry] = float(servers[entry].unread_tokens)
        chosen = choose(request, unread)
        passed_on[entry][chosen] += request.prompt_tokens
        servers[chosen].offer(request)
        places[chosen].append(place)
    results = {name: server.run() for name, server in servers.items()}
    first_s = np.empty(len(requests))
    for name, numbers in places.items():
        first_s[np.asarray(numbers, int)] = results[name].first_s
    return float(sum(result.loaded_bytes for result in results.values())), first_s
