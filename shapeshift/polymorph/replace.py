"""From the bins that workers hold to the bins that an allocation wants (Arlo, section 4, instance replacement)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def changes(have: Sequence[int], want: Sequence[int], edges: Sequence[int]) -> list[tuple[int, int]]:
    """The fewest changes (worker, new bin) after which `want[i]` workers hold `edges[i]`, by worker.

    have: the bin of each worker, one of `edges`, which ascend strictly; want: sums to the number of workers.
    Of a bin with too many workers the last ones change. Surplus and lacking bins are paired in order of
    length, so that the workers move by the least distance in all.
    Raises ValueError naming the field.
    """
    if any(b <= a for a, b in zip(edges, edges[1:], strict=False)):
        raise ValueError(f"edges: got {list(edges)}; strictly ascending")
    if len(want) != len(edges):
        raise ValueError(f"want: got {len(want)} values; as many as edges has ({len(edges)})")
    if any(count < 0 for count in want) or sum(want) != len(have):
        raise ValueError(f"want: got {list(want)}; counts whose sum is the number of workers ({len(have)})")
    if strange := [held for held in have if held not in set(edges)]:
        raise ValueError(f"have: got {strange[0]}; one of edges ({', '.join(map(str, edges))})")
    surplus: list[int] = []
    lacking: list[int] = []
    for edge, wanted in zip(edges, want, strict=True):
        holders = [worker for worker, held in enumerate(have) if held == edge]
        surplus += holders[wanted:]
        lacking += [edge] * (wanted - len(holders))
    return sorted(zip(surplus, lacking, strict=True))


def batches(planned: Sequence[tuple[int, int]], have: Sequence[int], size: int = 1) -> Iterator[list[tuple[int, int]]]:
    """The changes in the order in which to carry them out, at most `size` at once.

    Workers grow before others shrink: at no time do fewer workers take a length than before or after all of
    it, those that are just being changed left aside. The longest bins come first, shrinking ones last.
    """
    if size < 1:
        raise ValueError(f"size: got {size}; at least 1")
    grown = sorted((pair for pair in planned if pair[1] > have[pair[0]]), key=lambda pair: (-pair[1], pair[0]))
    shrunk = sorted((pair for pair in planned if pair[1] <= have[pair[0]]), key=lambda pair: (-pair[1], pair[0]))
    for part in (grown, shrunk):
        for start in range(0, len(part), size):
            yield part[start : start + size]
