"""What the parts of `bench.gpu` have in common: what they are called with, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bench.gpu.device import Device

Row = dict[str, Any]
"""A line of a table: column to text or number. Times are in milliseconds; a ratio above 1 says that ours is faster."""
S = TypeVar("S")


@dataclass(frozen=True)
class Part(Generic[S]):
    """One part.

    what       one line
    measure    gives its rows, one when it is measured: of the device, the sizes and a seed
    full       sizes on a GPU
    rehearsal  sizes on a CPU: seconds
    minutes    after which no further row is begun
    """

    what: str
    measure: Callable[[Device, S, int], Iterator[Row]]
    full: S
    rehearsal: S
    minutes: float


def ratio(theirs: float, ours: float) -> float:
    """How many times faster ours is, with two places."""
    return round(theirs / ours, 2)
