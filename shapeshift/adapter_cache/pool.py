"""Who lies where in one flat memory: regions that adapters share, each of them contiguous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shapeshift.adapter_cache.layout import ALIGNMENT


@dataclass(frozen=True)
class Span:
    """Elements `start` to `start` + `length` - 1, within one region."""

    region: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Pool:
    """Regions 0 to slots-1 are the slots of the cache, region `reserve` is what lies behind them. Counts elements."""

    def __init__(self, slots: int, slot: int, total: int) -> None:
        self.reserve = slots
        self._bounds = [(number * slot, (number + 1) * slot) for number in range(slots)] + [(slots * slot, total)]
        self._spans: list[dict[str, Span]] = [{} for _ in self._bounds]
        self._region: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._region

    def __iter__(self) -> Iterator[str]:
        # Of a copy: any thread may ask while the generating one changes it.
        return iter(list(self._region))

    def span(self, name: str) -> Span:
        """Where `name` lies."""
        return self._spans[self._region[name]][name]

    def within(self, region: int) -> list[str]:
        """Who lies in `region`, by place."""
        spans = self._spans[region]
        return sorted(spans, key=lambda name: spans[name].start)

    def size(self, region: int) -> int:
        """Elements that `region` can hold."""
        first, end = self._bounds[region]
        return end - _aligned(first)

    def free(self, region: int) -> int:
        """Elements of `region` that nobody has, in however many holes."""
        return self.size(region) - sum(_aligned(span.length) for span in list(self._spans[region].values()))

    def hole(self, region: int, length: int) -> Span | None:
        """The first place in `region` for so many elements."""
        first, end = self._bounds[region]
        at = _aligned(first)
        for name in self.within(region):
            span = self._spans[region][name]
            if span.start - at >= length:
                break
            at = _aligned(span.end)
        return Span(region, at, length) if at + length <= end else None

    def put(self, name: str, span: Span) -> None:
        """`name` lies at `span` from now on, and nowhere else."""
        if name in self._region:
            self.remove(name)
        self._spans[span.region][name] = span
        self._region[name] = span.region

    def remove(self, name: str) -> None:
        """`name` lies nowhere."""
        del self._spans[self._region.pop(name)][name]

    def check_integrity(self) -> None:
        """Raise AssertionError where two overlap, or one lies outside its region."""
        assert sum(map(len, self._spans)) == len(self._region), "the pool has lost count"
        for region, (first, end) in enumerate(self._bounds):
            at = first
            for name in self.within(region):
                span = self._spans[region][name]
                assert self._region[name] == span.region == region and span.length > 0, f"{name} is misplaced"
                assert at <= span.start and span.start % ALIGNMENT == 0, f"{name} overlaps another"
                at = span.end
            assert at <= end, f"region {region} overflows"


def _aligned(element: int) -> int:
    return -(-element // ALIGNMENT) * ALIGNMENT
