"""A simulation of several nodes, each with a decode loop and adapters of its own, behind fronts that share requests.

Each request enters at one node, in turn. Its front knows its own work exactly; of another node it knows the work at the
last look, and what it has itself passed on there since. Passing a request on takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shapeshift.simulate.adapter_cache import SimulatedRequest, SimulatedServer, SimulationResult


@dataclass(frozen=True)
class Work:
    """What a front counts: of_server: what waits or runs there; of_request: what one request adds."""

    of_server: Callable[[SimulatedServer], float]
    of_request: Callable[[SimulatedRequest], float]


REQUESTS = Work(lambda server: server.load, lambda request: 1.0)
UNREAD_TOKENS = Work(lambda server: server.unread_tokens, lambda request: request.prompt_tokens)
Choose = Callable[[SimulatedRequest, Mapping[str, float], str], str]
"""choose(request, work by node, own node): the node that serves the request."""


def run_fleet(
    servers: Mapping[str, SimulatedServer],
    requests: Sequence[SimulatedRequest],
    choose: Choose,
    look_s: float,
    work: Work = REQUESTS,
) -> tuple[dict[str, SimulationResult], dict[str, list[int]]]:
    """Serve `requests`, in order of arrival, to the end: by node, the result, and the places of its requests.

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
            seen = {name: float(work.of_server(server)) for name, server in servers.items()}
            passed_on = {name: dict.fromkeys(names, 0.0) for name in names}
        entry = names[place % len(names)]
        loads = {name: seen[name] + passed_on[entry][name] for name in names}
        loads[entry] = float(work.of_server(servers[entry]))
        chosen = choose(request, loads, entry)
        passed_on[entry][chosen] += work.of_request(request)
        servers[chosen].offer(request)
        places[chosen].append(place)
    return {name: server.run() for name, server in servers.items()}, places


def first_s(results: Mapping[str, SimulationResult], places: Mapping[str, Sequence[int]]) -> NDArray[np.float64]:
    """Seconds from arrival to the first token, of all requests in order of arrival."""
    times = np.empty(sum(map(len, places.values())))
    for name, numbers in places.items():
        times[np.asarray(numbers, int)] = results[name].first_s
    return times
