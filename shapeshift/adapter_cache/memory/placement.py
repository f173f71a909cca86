"""The places of adapters in the shared buffer, and evictions (Chameleon, section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shapeshift.adapter_cache.interfaces import EvictEntry, EvictionRule
from shapeshift.adapter_cache.lora.batch import ALIGNMENT, shifted
from shapeshift.adapter_cache.memory.adapter_table import ABSENT, READY, Adapter, AdapterTable
from shapeshift.adapter_cache.metrics import FOR_ADAPTER, CacheMetrics


@dataclass(frozen=True)
class Span:
    """Elements `start` to `start` + `length` - 1, within one region."""

    region: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Regions:
    """Which adapter is where in a flat buffer, counted in elements.

    Regions 0 to slots - 1 are the slots of the KV cache; region `reserve` is the rest of the buffer behind them.
    """

    def __init__(self, slots: int, slot_elements: int, total_elements: int) -> None:
        self.reserve = slots
        self._bounds = [(number * slot_elements, (number + 1) * slot_elements) for number in range(slots)]
        self._bounds.append((slots * slot_elements, total_elements))
        self._spans: list[dict[str, Span]] = [{} for _ in self._bounds]
        self._region: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._region

    def __iter__(self) -> Iterator[str]:
        # Of a copy: any thread may iterate while the generating thread changes it.
        return iter(list(self._region))

    def span(self, name: str) -> Span:
        """The span of `name`."""
        return self._spans[self._region[name]][name]

    def names_in(self, region: int) -> list[str]:
        """The names in `region`, by position."""
        spans = self._spans[region]
        return sorted(spans, key=lambda name: spans[name].start)

    def size(self, region: int) -> int:
        """Usable elements of `region`."""
        first, end = self._bounds[region]
        return end - _aligned(first)

    def free(self, region: int) -> int:
        """Free elements of `region`, in any number of gaps."""
        return self.size(region) - sum(_aligned(span.length) for span in list(self._spans[region].values()))

    def find_gap(self, region: int, length: int) -> Span | None:
        """The first gap of `length` elements in `region`."""
        first, end = self._bounds[region]
        at = _aligned(first)
        for name in self.names_in(region):
            span = self._spans[region][name]
            if span.start - at >= length:
                break
            at = _aligned(span.end)
        return Span(region, at, length) if at + length <= end else None

    def put(self, name: str, span: Span) -> None:
        """Move `name` to `span`."""
        if name in self._region:
            self.remove(name)
        self._spans[span.region][name] = span
        self._region[name] = span.region

    def remove(self, name: str) -> None:
        """Free the span of `name`."""
        del self._spans[self._region.pop(name)][name]

    def check_integrity(self) -> None:
        """Raise AssertionError if two spans overlap, or one is outside its region."""
        assert sum(map(len, self._spans)) == len(self._region), "the number of spans is wrong"
        for region, (first, end) in enumerate(self._bounds):
            at = first
            for name in self.names_in(region):
                span = self._spans[region][name]
                assert self._region[name] == span.region == region and span.length > 0, f"{name} is misplaced"
                assert at <= span.start and span.start % ALIGNMENT == 0, f"{name} overlaps another"
                at = span.end
            assert at <= end, f"region {region} overflows"


def _aligned(element: int) -> int:
    return -(-element // ALIGNMENT) * ALIGNMENT


class Placement:
    """The adapters in the buffer. Used by the generating thread, between iterations.

    table    all adapters; those that requests wait for are evicted last
    clock    of the eviction rule
    version  changes when a loaded adapter moves or is evicted
    """

    def __init__(
        self, memory: torch.Tensor, regions: Regions, table: AdapterTable, rule: EvictionRule, metrics: CacheMetrics
    ) -> None:
        self.version = 0
        self.clock = 0.0
        self.regions = regions
        self.element_bytes = memory.element_size()
        self._memory = memory
        self._table = table
        self._rule = rule
        self._metrics = metrics

    def find(self, adapter: Adapter, slots: Sequence[int]) -> Span | None:
        """Free space for `adapter` in the reserve, which may be compacted, or in one of `slots`."""
        reserve = self.regions.reserve
        span = self.regions.find_gap(reserve, adapter.elements)
        if span is None and self.regions.free(reserve) >= adapter.elements:
            self._compact_reserve()
            span = self.regions.find_gap(reserve, adapter.elements)
        if span is None and not adapter.pinned:
            gaps = (self.regions.find_gap(slot, adapter.elements) for slot in slots)
            span = next((gap for gap in gaps if gap is not None), None)
        return span

    def evict_for(self, adapter: Adapter, slots: Sequence[int], spare_waiting: bool) -> Span | None:
        """Space for `adapter`, for which idle adapters are evicted; None if there are not enough of them.

        slots: may be used; spare_waiting: whether adapters that requests wait for stay.
        """
        fits_slot = adapter.elements <= self.regions.size(0) and not adapter.pinned
        regions = [self.regions.reserve, *(slots if fits_slot else ())]
        if not self._is_feasible(adapter, regions, spare_waiting):
            return None
        span = None
        while span is None:
            names, self.clock = self._rule.choose(self._entries(regions, spare_waiting), 1, self.clock)
            if not names:
                return None
            self.evict(self._table[names[0]], FOR_ADAPTER)
            span = self.find(adapter, slots)
        return span

    def place(self, adapter: Adapter, span: Span) -> torch.Tensor:
        """Put `adapter` at `span`; returns its memory."""
        self.regions.put(adapter.name, span)
        adapter.places = shifted(adapter.relative, span.start)
        return self._memory[span.start : span.end]

    def evict(self, adapter: Adapter, reason: str) -> None:
        """Remove `adapter` from the buffer. reason: see `metrics`."""
        self.remove(adapter)
        self.version += 1
        self._metrics.evictions[reason].add()

    def remove(self, adapter: Adapter) -> None:
        """Free the space of `adapter`, which has not been used."""
        self.regions.remove(adapter.name)
        adapter.state, adapter.places = ABSENT, None

    def check_integrity(self) -> None:
        """Raise AssertionError if places and states contradict each other."""
        self.regions.check_integrity()
        for name in self.regions:
            adapter, span = self._table[name], self.regions.span(name)
            assert adapter.state != ABSENT and span.length == adapter.elements, f"{name} has a place but is absent"
            assert adapter.places is not None, f"{name} has no places"
            assert torch.equal(adapter.places, shifted(adapter.relative, span.start)), f"{name} has wrong places"
        for adapter in self._table.all():
            is_absent = adapter.name not in self.regions
            assert (adapter.state == ABSENT) == is_absent, f"{adapter.name} is resident without a place"

    def _is_feasible(self, adapter: Adapter, regions: Sequence[int], spare_waiting: bool) -> bool:
        """Whether `adapter` fits into one of `regions` without the idle adapters there."""
        for region in regions:
            idle = [entry for entry in self._entries([region], spare_waiting) if not entry.pinned]
            lengths = sum(self.regions.span(entry.id).length for entry in idle)
            if self.regions.free(region) + lengths >= adapter.elements:
                return True
        return False

    def _entries(self, regions: Sequence[int], spare_waiting: bool) -> list[EvictEntry]:
        """The idle adapters in `regions`."""
        residents = [self._table[name] for region in regions for name in self.regions.names_in(region)]
        return [
            EvictEntry(one.name, one.info.bytes, one.uses, one.last, 0, is_waited_for, one.pinned, one.base)
            for one in residents
            if one.is_idle and not ((is_waited_for := one.name in self._table.waiting) and spare_waiting)
        ]

    def _compact_reserve(self) -> None:
        """Move the adapters of the reserve together; those that are loading stay."""
        for name in self.regions.names_in(self.regions.reserve):
            adapter, span = self._table[name], self.regions.span(name)
            if adapter.state != READY:
                continue
            self.regions.remove(name)
            gap = self.regions.find_gap(self.regions.reserve, span.length)
            assert gap is not None, "the old span is free"
            if gap.start != span.start:
                # A copy: the old and the new span may overlap.
                weights = self._memory[span.start : span.end].clone()
                self.version += 1
                self.place(adapter, gap).copy_(weights)
            self.regions.put(name, gap)
