"""A node, one Triton with our backends, and which nodes a fleet has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shapeshift.settings import require
from shapeshift.triton.endpoint import Endpoint

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Node:
    """name: a DNS label; metrics: URL of its metrics page; key_file: the key of its model control, None without one.

    Raises InvalidInputError with the name of the field.
    """

    name: str
    grpc: Endpoint
    metrics: str
    key_file: Path | None = None

    def __post_init__(self) -> None:
        check_node_name(self.name)
        is_url = self.metrics.startswith(("http://", "https://"))
        require(is_url, f"node {self.name}: metrics", self.metrics, "must be http:// or https:// HOST:PORT/metrics")


def check_node_name(name: str) -> str:
    """`name` itself. Raises InvalidInputError unless it is a DNS label: a-z, 0-9, `-`, at most 63."""
    require(bool(_NAME.fullmatch(name)), "node", name, "must be a-z, 0-9 and - between them, at most 63 characters")
    return name


def doubled(nodes: Iterable[Node]) -> dict[str, str]:
    """By name that several nodes have, what is wrong: they cannot be told apart, and none of them is to be used."""
    addresses: dict[str, list[str]] = {}
    for node in nodes:
        addresses.setdefault(node.name, []).append(node.grpc.address)
    several = {name: places for name, places in addresses.items() if len(places) > 1}
    return {name: f"nodes at {', '.join(places)} have it; none of them is used" for name, places in several.items()}


@dataclass(frozen=True)
class Members:
    """nodes: in the order of their names; problem: why the list may be out of date, or names an invalid entry."""

    nodes: Sequence[Node] = ()
    problem: str = ""


class Membership(Protocol):
    """Which nodes the fleet has now. Asked about once a second, by one thread."""

    def members(self) -> Members:
        """The present nodes. Where they cannot be read, the last ones, with the problem; raises nothing."""

    def close(self) -> None:
        """Release what it holds."""
