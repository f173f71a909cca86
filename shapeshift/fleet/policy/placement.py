"""Which node of a fleet serves a request.

By least work, or by affinity: requests with one key, such as the name of an adapter, go to one node, as long as no
other one has clearly less to read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

# A request is passed on only to a node that has so much less work: that costs a hop, and loads are up to `LOOK_S` old.
MARGIN = 2.0
RELATIVE_MARGIN = 0.25
# Prompt tokens that a home may have more than another node: few steps of prompts, more than an adapter takes to load.
UNREAD_MARGIN = 800.0
LOOK_S = 0.25
"""Seconds between two looks at the work of another node. A prompt is read in less than a second."""


def least_work(loads: Mapping[str, float], here: str) -> str:
    """The node with the least work, or `here` where no other one has clearly less.

    loads: by node, requests that wait or run there; `here` is among them.
    """
    least = min(sorted(loads), key=lambda node: loads[node])
    gained = loads[here] - loads[least]
    return least if gained >= max(MARGIN, RELATIVE_MARGIN * loads[here]) else here


def least_unread(key: str, unread_tokens: Mapping[str, float]) -> str:
    """The key's home; where another node has clearly less to read before a first token, the node with the least.

    The home is that of rendezvous hashing (Thaler and Ravishankar 1998): a node that joins or leaves moves only the
    keys that it gets or had. Every other node has to load what the key names, which `UNREAD_MARGIN` stands for.

    unread_tokens: by node, prompt tokens of the requests there that have no first token yet.
    """
    ranked = sorted(unread_tokens, key=lambda node: _score(node, key), reverse=True)
    home, least = ranked[0], min(ranked, key=lambda node: unread_tokens[node])
    return least if unread_tokens[home] - unread_tokens[least] >= UNREAD_MARGIN else home


def _score(node: str, key: str) -> bytes:
    return hashlib.blake2b(f"{node}\0{key}".encode(), digest_size=8).digest()
