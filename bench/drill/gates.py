"""What a run must hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.drill.leftovers import Footprint
from bench.drill.outcomes import WRONG, Cost

FLAT = 0.02
"""A soak's RSS may grow by this share."""


def missed(name: str, cost: Cost, whole_within_s: float) -> Iterator[str]:
    """A line for each gate that the fault `name` misses."""
    if cost.counts[WRONG]:
        yield f"{name}: {cost.counts[WRONG]} wrong answers"
    if cost.unexcused:
        yield f"{name}: {cost.unexcused} requests lost that no killed process held"
    if cost.whole_s > whole_within_s:
        yield f"{name}: whole after {cost.whole_s:.1f} s, the bound is {whole_within_s:g} s"


def left_behind(name: str, usual: Footprint, after: Footprint) -> Iterator[str]:
    """A line for processes that a fault leaves behind. usual: before the first fault.

    The other columns tell what Triton keeps of a process that died; docs/drill.md says what that is.
    """
    if after.processes > usual.processes:
        yield f"{name}: {after.processes - usual.processes} processes left behind"


def server_ended(name: str, before: int | None, after: int | None) -> Iterator[str]:
    """A line for a server that ended by itself; before, after: its process ids."""
    if before != after:
        yield f"{name}: the server ended by itself and was started again"


def not_flat(samples: Mapping[str, Sequence[Footprint]]) -> Iterator[str]:
    """A line for each process of a soak that grows. samples: by process, in order, those after the warm-up.

    The medians of the first and the last quarter are compared.
    """
    for process, footprints in samples.items():
        quarter = max(1, len(footprints) // 4)
        first, last = footprints[:quarter], footprints[-quarter:]
        for what, share in (("rss_mb", FLAT), ("threads", 0.0), ("fds", 0.0)):
            was, now = (_median([getattr(one, what) for one in part]) for part in (first, last))
            if now > was * (1 + share):
                yield f"{process}: {what} grew from {was:g} to {now:g}"


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
