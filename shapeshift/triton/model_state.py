"""The state of one model version on a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelState:
    """One entry of the server's repository index. state: READY, LOADING, UNLOADING, UNAVAILABLE or empty."""

    name: str
    version: str
    state: str
    reason: str
