"""The baseline that Arlo is compared with (section 5): INFaaS' bin-packing dispatch and headroom scaling.

The paper only names both. They follow INFaaS (ATC '21) and its published code: a request goes to the fullest
instance with free capacity, so that few instances are busy, and load stays some headroom below capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

from shapeshift.polymorph.policy.dispatch import Id, Instance, Level, Rules


def pack(length: int, levels: Sequence[Level[Id]]) -> tuple[int, Id] | None:
    """The level (its index) and instance for a request; None if no level can take it.

    Among all instances that are long enough and below capacity: the fullest by outstanding / capacity, then
    the shortest level, then the lowest id. With all at capacity: the least full.
    """
    candidates = [
        (instance.outstanding / instance.capacity, index, instance)
        for index, level in enumerate(levels)
        if level.max_length >= length
        for instance in level.instances
    ]
    if not candidates:
        return None
    free = [one for one in candidates if one[2].outstanding < one[2].capacity]
    if free:
        _, index, instance = min(free, key=lambda one: (-one[0], one[1], one[2].id))
    else:
        _, index, instance = min(candidates, key=lambda one: (one[0], one[1], one[2].id))
    return index, instance.id


class Packer(Generic[Id]):
    """`pack` for a running system, with the interface of `dispatcher.Dispatcher`; O(instances) a decision.

    max_lengths: of the levels, strictly ascending; services_ms, rules: not used. Not thread-safe.
    """

    def __init__(
        self, max_lengths: Sequence[int], services_ms: Sequence[float] = (), rules: Rules | None = None
    ) -> None:
        self._levels: list[dict[Id, Instance[Id]]] = [{} for _ in max_lengths]
        self._lengths = list(max_lengths)
        self._level_of: dict[Id, int] = {}

    def add(self, level: int, instance: Id, capacity: float, outstanding: int = 0) -> None:
        """Add an instance."""
        self._levels[level][instance] = Instance(instance, outstanding, capacity)
        self._level_of[instance] = level

    def remove(self, instance: Id) -> int:
        """Remove an instance and return its outstanding requests. Raises KeyError for an unknown one."""
        return self._levels[self._level_of.pop(instance)].pop(instance).outstanding

    def heads(self, length: int) -> list[Id]:
        """The instances among which `dispatch` would choose: all that are long enough."""
        rows = zip(self._lengths, self._levels, strict=True)
        return [instance for longest, instances in rows if longest >= length for instance in instances]

    def dispatch(self, length: int) -> tuple[int, Id] | None:
        """Choose level and instance, and count the request as outstanding; None if no level can take it."""
        levels = [
            Level(longest, tuple(instances.values()))
            for longest, instances in zip(self._lengths, self._levels, strict=True)
        ]
        chosen = pack(length, levels)
        if chosen is not None:
            self._change(chosen[1], 1)
        return chosen

    def finish(self, instance: Id) -> None:
        """Record that a request of the instance was answered. Raises KeyError for an unknown one."""
        self._change(instance, -1)

    def _change(self, instance: Id, by: int) -> None:
        level = self._levels[self._level_of[instance]]
        level[instance] = replace(level[instance], outstanding=level[instance].outstanding + by)


@dataclass(frozen=True)
class Headroom:
    """share: of the capacity that stays free; in_after: decisions in a row that must find one worker too many."""

    share: float = 0.05
    in_after: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share: got {self.share}; at least 0 and below 1")
        if self.in_after < 1:
            raise ValueError(f"in_after: got {self.in_after}; at least 1")


INFAAS = Headroom()


def scale(
    load: float,
    capacity: float,
    workers: int,
    min_workers: int,
    max_workers: int,
    spare_since: int = 0,
    headroom: Headroom = INFAAS,
) -> tuple[int, int]:
    """The workers wanted, and `spare_since` for the next decision.

    load: requests a second; capacity: of one worker (> 0). As many workers are added at once as the headroom
    needs; one is released when `in_after` decisions in a row, counted by spare_since, found that one fewer
    suffices. The bounds always hold.
    """
    if not 1 <= min_workers <= max_workers:
        raise ValueError(f"min_workers: got {min_workers}; 1 to max_workers ({max_workers})")
    if load < 0 or capacity <= 0:
        raise ValueError(f"load, capacity: got {load}, {capacity}; at least 0, above 0")
    needed = min(max(math.ceil(load / (capacity * (1.0 - headroom.share))), min_workers), max_workers)
    if needed >= workers:
        return needed, 0
    if workers > max_workers:
        return max_workers, 0
    if spare_since + 1 < headroom.in_after:
        return workers, spare_since + 1
    return workers - 1, 0
