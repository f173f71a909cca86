"""The places of adapters in the shared buffer, and evictions (Chameleon, section 4.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shapeshift.adapter_cache.lora.batch import ALIGNMENT, shifted
from shapeshift.adapter_cache.memory.adapter_table import ABSENT, READY, Adapter, AdapterTable
from shapeshift.adapter_cache.policy.eviction import EvictEntry, RankedEviction
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.serving import events
from shapeshift.serving.metrics import Counter

FOR_ADAPTER, FOR_REQUEST, REMOVED = "room", "request", "gone"
"""Why an adapter is evicted: another adapter or a request gets its memory; or no request may use it any more."""


@dataclass(frozen=True)
class SharedMemory:
    """The buffer of the cache, whose blocks texts and adapters share.

    buffer         flat: the blocks of `pool`, `block_elements` each, and behind them the reserve of the adapters
    text_blocks    blocks of the longest text
    is_shared      whether threads compute with adapters in use while places change: these stay where they are
    """

    buffer: torch.Tensor
    pool: BlockPool
    block_elements: int
    text_blocks: int
    is_shared: bool = False


@dataclass(frozen=True)
class BlockRun:
    """`count` blocks in a row."""

    start: int
    count: int


@dataclass(frozen=True)
class Span:
    """Elements `start` to `start` + `length` - 1 of the buffer; run: of the pool's blocks, None in the reserve."""

    start: int
    length: int
    run: BlockRun | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


class Reserve:
    """The elements `first` to `end` - 1, which are for adapters alone. spans: of all adapters, those in blocks too."""

    def __init__(self, first: int, end: int, spans: Mapping[str, Span]) -> None:
        self._first, self._end = _aligned(first), end
        self._spans = spans

    @property
    def names(self) -> list[str]:
        """The adapters in it, by position."""
        names = (name for name, span in self._spans.items() if span.run is None)
        return sorted(names, key=lambda name: self._spans[name].start)

    @property
    def size(self) -> int:
        """Usable elements."""
        return self._end - self._first

    @property
    def free(self) -> int:
        """Free elements, in any number of gaps. Any thread."""
        return self.size - sum(_aligned(span.length) for span in list(self._spans.values()) if span.run is None)

    def find_gap(self, length: int, moving: str = "") -> Span | None:
        """The first gap of `length` elements. moving: an adapter whose place counts as free."""
        at = self._first
        for name in self.names:
            span = self._spans[name]
            if name == moving:
                continue
            if span.start - at >= length:
                break
            at = _aligned(span.end)
        return Span(at, length) if at + length <= self._end else None

    def check_integrity(self) -> None:
        """Raise AssertionError if two spans overlap, or one is outside the reserve."""
        at = self._first
        for name in self.names:
            span = self._spans[name]
            assert span.length > 0, f"{name} is misplaced"
            assert at <= span.start and span.start % ALIGNMENT == 0, f"{name} overlaps another"
            at = span.end
        assert at <= self._end, "the reserve overflows"


def _aligned(element: int) -> int:
    return -(-element // ALIGNMENT) * ALIGNMENT


class Placement:
    """The adapters in the buffer: in the reserve behind the blocks, or in runs of blocks that no text holds.

    Used by the generating thread, between iterations.

    table    all adapters; those that requests wait for are evicted last
    clock    of the eviction rule
    evictions  counters, by reason
    version  changes when a loaded adapter moves or is evicted
    """

    def __init__(self, memory: SharedMemory, table: AdapterTable, rule: RankedEviction) -> None:
        self.version = 0
        self.clock = 0.0
        self._spans: dict[str, Span] = {}
        self.reserve = Reserve(memory.pool.count * memory.block_elements, memory.buffer.numel(), self._spans)
        self.element_bytes = memory.buffer.element_size()
        self._memory = memory
        self._pool = memory.pool
        self._table = table
        self._rule = rule
        self.evictions = {
            reason: Counter("adapter_evictions_total", "Adapters evicted, by reason", {"why": reason})
            for reason in (FOR_ADAPTER, FOR_REQUEST, REMOVED)
        }

    def __iter__(self) -> Iterator[str]:
        # Of a copy: any thread may iterate while the generating thread changes it.
        return iter(list(self._spans))

    def span(self, name: str) -> Span:
        """The span of `name`."""
        return self._spans[name]

    def run_blocks(self, name: str) -> int:
        """Blocks that `name` has borrowed; 0 of one in the reserve."""
        run = self._spans[name].run
        return 0 if run is None else run.count

    @property
    def idle_blocks(self) -> int:
        """Blocks of the adapters that may be evicted."""
        return sum(self.run_blocks(name) for name in self if self._table[name].is_idle)

    def find(self, adapter: Adapter, reserved: int) -> Span | None:
        """Space for `adapter` in the reserve, which may be compacted, or in blocks, which are borrowed then.

        reserved: blocks that must stay available to texts beside it.
        """
        span = self.reserve.find_gap(adapter.elements)
        if span is None and self.reserve.free >= adapter.elements:
            self._compact_reserve()
            span = self.reserve.find_gap(adapter.elements)
        if span is None and self._may_borrow(adapter, reserved, self._pool.borrowed):
            count = self._blocks(adapter)
            start = self._pool.borrow(count)
            if start is not None:
                run = BlockRun(start, count)
                span = Span(start * self._memory.block_elements, adapter.elements, run)
        return span

    def evict_for(self, adapter: Adapter, reserved: int, spared: Container[str]) -> Span | None:
        """Space for `adapter`, for which idle adapters are evicted; None if there are not enough of them.

        reserved: see `find`; spared: idle adapters that stay.
        """
        borrowed = self._pool.borrowed - self.idle_blocks
        names = [
            name for name in self if self._spans[name].run is None or self._may_borrow(adapter, reserved, borrowed)
        ]
        if not self._is_feasible(adapter, names, spared):
            return None
        span = None
        while span is None:
            present = [name for name in names if name in self._spans]
            chosen, self.clock = self._rule.choose(self._entries(present, spared), 1, self.clock)
            if not chosen:
                return None
            self.evict(self._table[chosen[0]], FOR_ADAPTER)
            span = self.find(adapter, reserved)
        return span

    def reclaim(self, blocks: int) -> None:
        """Evict idle adapters until so many blocks are free in the pool, as far as there are any."""
        while self._pool.free < blocks:
            entries = self._entries([name for name in self if self.run_blocks(name)])
            # A pin is for the reserve alone.
            chosen, self.clock = self._rule.choose(
                [dataclasses.replace(entry, pinned=False) for entry in entries], 1, self.clock
            )
            if not chosen:
                return
            self.evict(self._table[chosen[0]], FOR_REQUEST)

    def place(self, adapter: Adapter, span: Span) -> torch.Tensor:
        """Put `adapter` at `span`, which `find` has found; returns its memory."""
        self._spans[adapter.name] = span
        adapter.places, adapter.start = shifted(adapter.relative, span.start), span.start
        return self._memory.buffer[span.start : span.end]

    def evict(self, adapter: Adapter, reason: str) -> None:
        """Remove `adapter` from the buffer. reason: one of `evictions`."""
        self.remove(adapter)
        self.version += 1
        self.evictions[reason].add()
        events.record("evict", adapter=adapter.label, why=reason, bytes=adapter.info.bytes)

    def remove(self, adapter: Adapter) -> None:
        """Free the space of `adapter`, which has not been used."""
        span = self._spans.pop(adapter.name)
        if span.run is not None:
            self._pool.give_back(span.run.start, span.run.count)
        adapter.state, adapter.places = ABSENT, None

    def check_integrity(self) -> None:
        """Raise AssertionError if places, blocks and states contradict each other."""
        self.reserve.check_integrity()
        runs = sum(map(self.run_blocks, self))
        assert runs == self._pool.borrowed, f"adapters have {runs} blocks, {self._pool.borrowed} are lent"
        assert runs <= self._pool.count - self._memory.text_blocks, "adapters leave too few blocks for one text"
        for name in self:
            adapter, span = self._table[name], self._spans[name]
            assert adapter.state != ABSENT and span.length == adapter.elements, f"{name} has a place but is absent"
            assert adapter.places is not None, f"{name} has no places"
            assert torch.equal(adapter.places, shifted(adapter.relative, span.start)), f"{name} has wrong places"
        for adapter in self._table.all():
            is_absent = adapter.name not in self._spans
            assert (adapter.state == ABSENT) == is_absent, f"{adapter.name} is resident without a place"

    def _blocks(self, adapter: Adapter) -> int:
        return -(-adapter.elements // self._memory.block_elements)

    def _may_borrow(self, adapter: Adapter, reserved: int, borrowed: int) -> bool:
        """Whether `adapter` may lie in blocks, beside adapters that have `borrowed` of them: one text always fits."""
        count = self._blocks(adapter)
        leaves_one = borrowed + count <= self._pool.count - self._memory.text_blocks
        return not adapter.pinned and leaves_one and self._pool.available - count >= reserved

    def _is_feasible(self, adapter: Adapter, names: Sequence[str], spared: Container[str]) -> bool:
        """Whether `adapter` fits into the reserve, or into blocks, without the idle adapters among `names`."""
        idle = [entry.id for entry in self._entries(names, spared) if not entry.pinned]
        in_reserve = sum(self._spans[name].length for name in idle if not self.run_blocks(name))
        if self.reserve.free + in_reserve >= adapter.elements:
            return True
        blocks = sum(map(self.run_blocks, idle))
        return blocks > 0 and self._pool.free + blocks >= self._blocks(adapter)

    def _entries(self, names: Sequence[str], spared: Container[str] = ()) -> list[EvictEntry]:
        """The idle adapters among `names` without those `spared`."""
        return [
            EvictEntry(
                one.name, one.info.bytes, one.uses, one.last, 0, one.name in self._table.waiting, one.pinned, one.base
            )
            for one in (self._table[name] for name in names)
            if one.is_idle and one.name not in spared
        ]

    def _compact_reserve(self) -> None:
        """Move the adapters of the reserve together; those that are loading stay, see also `SharedMemory.is_shared`."""
        for name in self.reserve.names:
            adapter, span = self._table[name], self._spans[name]
            if adapter.state != READY or (self._memory.is_shared and adapter.users):
                continue
            gap = self.reserve.find_gap(span.length, moving=name)
            assert gap is not None, "the old span is free"
            if gap.start != span.start:
                # A copy: the old and the new span may overlap.
                weights = self._memory.buffer[span.start : span.end].clone()
                self.version += 1
                self.place(adapter, gap).copy_(weights)
