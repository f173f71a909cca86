"""Where adapters get their places, and who goes for them (Chameleon, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shapeshift.adapter_cache.evict import EvictEntry, choose
from shapeshift.adapter_cache.known import Known
from shapeshift.adapter_cache.layout import moved
from shapeshift.adapter_cache.meters import ROOM, CacheMeters
from shapeshift.adapter_cache.pool import Pool, Span
from shapeshift.adapter_cache.record import ABSENT, READY, Adapter


class Placement:
    """The pool's memory and the adapters that lie in it. Used by the generating thread, between iterations.

    known    all adapters; those that a request waits for go last
    clock    gdsf's, see `evict.choose`
    version  changes when an adapter that is ready moves or goes
    """

    def __init__(
        self,
        memory: torch.Tensor,
        pool: Pool,
        known: Known,
        algorithm: str,
        meters: CacheMeters,
    ) -> None:
        self.version = 0
        self.clock = 0.0
        self.pool = pool
        self.width = memory.element_size()
        self._memory = memory
        self._known = known
        self._algorithm = algorithm
        self._meters = meters

    def vacant(self, one: Adapter, slots: Sequence[int]) -> Span | None:
        """A place for which nobody has to go: in the reserve, or in one of `slots`. Closes gaps of the reserve."""
        reserve = self.pool.reserve
        span = self.pool.hole(reserve, one.elements)
        if span is None and self.pool.free(reserve) >= one.elements:
            self._close_gaps()
            span = self.pool.hole(reserve, one.elements)
        if span is None and not one.pinned:
            holes = (self.pool.hole(slot, one.elements) for slot in slots)
            span = next((hole for hole in holes if hole is not None), None)
        return span

    def make_room(self, one: Adapter, slots: Sequence[int], spare_waiting: bool) -> Span | None:
        """A place for which idle adapters go, by the eviction's order; None where all of them were not enough.

        slots: may be used; spare_waiting: whether those that a request waits for stay.
        """
        small = one.elements <= self.pool.size(0) and not one.pinned
        regions = [self.pool.reserve, *(slots if small else ())]
        if not self._feasible(one, regions, spare_waiting):
            return None
        span = None
        while span is None:
            names, self.clock = choose(self._entries(regions, spare_waiting), 1, self.clock, self._algorithm)
            if not names:
                return None
            self.drop(self._known[names[0]], ROOM)
            span = self.vacant(one, slots)
        return span

    def settle(self, one: Adapter, span: Span) -> torch.Tensor:
        """`one` lies at `span` from now on; its memory."""
        self.pool.put(one.name, span)
        one.places = moved(one.relative, span.start)
        return self._memory[span.start : span.end]

    def drop(self, one: Adapter, why: str) -> None:
        """`one` lies nowhere any more."""
        self.pool.remove(one.name)
        one.state, one.places = ABSENT, None
        self.version += 1
        self._meters.evictions[why].add()

    def check_integrity(self) -> None:
        """Raise AssertionError when places and states contradict one another."""
        self.pool.check_integrity()
        for name in self.pool:
            one, span = self._known[name], self.pool.span(name)
            assert one.state != ABSENT and span.length == one.elements, f"{name} has a place and is not there"
            assert one.places is not None and torch.equal(one.places, moved(one.relative, span.start)), (
                f"{name} is lost"
            )
        for one in self._known.all():
            assert (one.state == ABSENT) == (one.name not in self.pool), f"{one.name} is there without a place"

    def _feasible(self, one: Adapter, regions: Sequence[int], spare_waiting: bool) -> bool:
        """Whether `one` fits into a region once the idle ones have gone from it."""
        for region in regions:
            idle = [entry for entry in self._entries([region], spare_waiting) if not entry.pinned]
            lengths = sum(self.pool.span(entry.id).length for entry in idle)
            if self.pool.free(region) + lengths >= one.elements:
                return True
        return False

    def _entries(self, regions: Sequence[int], spare_waiting: bool) -> list[EvictEntry]:
        """The idle adapters in `regions`, as the eviction sees them."""
        residents = [self._known[name] for region in regions for name in self.pool.within(region)]
        return [
            EvictEntry(one.name, one.info.bytes, one.uses, one.last, 0, waits, one.pinned, one.base)
            for one in residents
            if one.idle and not ((waits := one.name in self._known.waiting) and spare_waiting)
        ]

    def _close_gaps(self) -> None:
        """Slide what lies in the reserve together; a load under way stays where it is."""
        for name in self.pool.within(self.pool.reserve):
            one, span = self._known[name], self.pool.span(name)
            if one.state != READY:
                continue
            self.pool.remove(name)
            hole = self.pool.hole(self.pool.reserve, span.length)
            assert hole is not None, "what lay there fits there"
            if hole.start != span.start:
                # The two may overlap.
                held = self._memory[span.start : span.end].clone()
                self.version += 1
                self.settle(one, hole).copy_(held)
            self.pool.put(name, hole)
