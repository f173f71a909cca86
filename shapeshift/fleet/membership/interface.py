"""The interface of membership: which nodes the fleet has now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shapeshift.fleet.node import Node


@dataclass(frozen=True)
class Members:
    """nodes: in the order of their names; problem: why the list may be out of date, or names an invalid entry."""

    nodes: Sequence[Node] = ()
    problem: str = ""


class Membership(Protocol):
    """Asked about once a second, by one thread."""

    def members(self) -> Members:
        """The present nodes. Where they cannot be read, the last ones, with the problem; raises nothing."""

    def close(self) -> None:
        """Release what it holds."""
