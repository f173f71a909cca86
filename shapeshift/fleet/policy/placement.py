"""Which node of a fleet serves a request.

By least work, or by affinity: requests with one key, such as the name of an adapter, go to one node, as long as that
node is not loaded above a bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

# A request is passed on only to a node that has so much less work: that costs a hop, and loads are up to a second old.
MARGIN = 2.0
RELATIVE_MARGIN = 0.25
# Of the mean load; c in the paper. The cost of finding another node falls with c, the largest load grows with it.
BOUND = 1.25


def least_work(loads: Mapping[str, float], own: str) -> str:
    """The node with the least work, or `own` where no other one has clearly less.

    loads: by node, requests that wait or run there; `own` is among them.
    """
    least = min(sorted(loads), key=lambda node: loads[node])
    gained = loads[own] - loads[least]
    return least if gained >= max(MARGIN, RELATIVE_MARGIN * loads[own]) else own


def bounded_affinity(key: str, loads: Mapping[str, float], free: float = 0.0, bound: float = BOUND) -> str:
    """The first node in the key's own order of nodes whose load is below the bound.

    The order is that of rendezvous hashing (Thaler and Ravishankar 1998): a node that joins or leaves moves only the
    keys that it gets or had. The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and
    Zadimoghaddam 2018, section 2): `bound` times the mean load, the new request included. A load below `free`, up to
    which no request waits, is never above it.
    """
    limit = max(math.ceil(bound * (sum(loads.values()) + 1) / len(loads)), free)
    ranked = sorted(loads, key=lambda node: _score(node, key), reverse=True)
    # The least loaded node is below the mean, so that there is always one.
    return next(node for node in ranked if loads[node] + 1 <= limit)


def _score(node: str, key: str) -> bytes:
    return hashlib.blake2b(f"{node}\0{key}".encode(), digest_size=8).digest()
