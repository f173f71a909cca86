"""The changes of bins that realise an allocation (Arlo, section 4, instance replacement)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def changes(have: Sequence[int], want: Sequence[int], edges: Sequence[int]) -> list[tuple[int, int]]:
    """The fewest changes (worker, new bin) after which `want[i]` workers hold `edges[i]`, sorted by worker.

    have: the bin of each worker, one of `edges`, which ascend strictly; want: its sum is the number of workers.
    In a bin with too many workers the last ones change. Surplus workers and missing bins are paired in order of
    length, so that the total distance is least.
    Raises ValueError naming the field.
    """
    if any(b <= a for a, b in zip(edges, edges[1:], strict=False)):
        raise ValueError(f"edges: got {list(edges)}; strictly ascending")
    if len(want) != len(edges):
        raise ValueError(f"want: got {len(want)} values; as many as edges has ({len(edges)})")
    if any(count < 0 for count in want) or sum(want) != len(have):
        raise ValueError(f"want: got {list(want)}; counts whose sum is the number of workers ({len(have)})")
    if unknown := [held for held in have if held not in set(edges)]:
        raise ValueError(f"have: got {unknown[0]}; one of edges ({', '.join(map(str, edges))})")
    surplus: list[int] = []
    missing: list[int] = []
    for edge, count in zip(edges, want, strict=True):
        holders = [worker for worker, held in enumerate(have) if held == edge]
        surplus += holders[count:]
        missing += [edge] * (count - len(holders))
    return sorted(zip(surplus, missing, strict=True))


def batches(planned: Sequence[tuple[int, int]], have: Sequence[int], size: int = 1) -> Iterator[list[tuple[int, int]]]:
    """The changes in the order in which to apply them, at most `size` at once.

    Workers grow before others shrink: apart from the workers being changed, there are never fewer workers for a
    length than before or after all changes. The longest new bins come first within each group.
    """
    if size < 1:
        raise ValueError(f"size: got {size}; at least 1")
    grown = sorted((pair for pair in planned if pair[1] > have[pair[0]]), key=lambda pair: (-pair[1], pair[0]))
    shrunk = sorted((pair for pair in planned if pair[1] <= have[pair[0]]), key=lambda pair: (-pair[1], pair[0]))
    for part in (grown, shrunk):
        for start in range(0, len(part), size):
            yield part[start : start + size]
