"""How many waiting rows and how many cores an engine call takes, and what calls and rows cost by the profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SMOOTHING = 0.1
_MIN_FACTOR, _MAX_FACTOR = 0.5, 8.0
MOST_CORES = 8
"""Of a call: a short text has no work for more."""
# Of the time on one core. Where recent calls take longer, other programs use the cores.
_WORTH = 0.8
_RATIO_SMOOTHING, _MOST_RATIO = 0.2, 1.5
_ALONE_S = 1.0
# Clients that have got their answers together come back within it.
_LULL_S = 0.01


def rows_to_take(lengths: Iterable[int], waiting: int, threads: int, tokens: int, max_rows: int) -> int:
    """The number of rows, from the head of the queue, that the next call takes.

    lengths: of the waiting rows in order of arrival (read only as far as needed); waiting: their number;
    threads: engine threads that share the queue; tokens: the efficient size of a pack; max_rows: row slots of a pack.
    The head is always taken. Further rows are taken in order while the pack stays within `tokens`, up to the thread's
    share of the queue: otherwise one thread could run two rows while another is idle.
    """
    share = min(max_rows, -(-waiting // threads))
    total = taken = 0
    for length in lengths:
        if taken and (taken >= share or total + length > tokens):
            break
        total += length
        taken += 1
        if taken >= share:
            break
    return taken


def row_costs(pack_ms: Sequence[float], pack_tokens: int, max_rows: int) -> list[float]:
    """Milliseconds of one row by its tokens: its share of a call that is full of such rows.

    pack_ms: of a call by its tokens in all, [longest + 1]; pack_tokens, max_rows: as of `rows_to_take`.
    """
    costs = [0.0]
    for tokens in range(1, len(pack_ms)):
        rows = max(1, min(max_rows, pack_tokens // tokens))
        costs.append(pack_ms[rows * tokens] / rows)
    return costs


def expected_ms(curve_ms: Sequence[float], weights: Sequence[float]) -> float:
    """Milliseconds of one text alone, over the lengths that are expected.

    curve_ms: of a call by its tokens, at least [longest + 1]; weights: of texts of 1, 2, ... longest tokens, not all 0.
    """
    return sum(ms * weight for ms, weight in zip(curve_ms[1:], weights, strict=False)) / sum(weights)


class MeasuredFactor:
    """`value` is measured time over profiled time of recent calls; 1 before the first."""

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, took: float, profiled: float) -> None:
        """Record one call; both times in the same unit. A call without a profiled time says nothing."""
        if profiled <= 0:
            return
        # One delayed call must not make all others look slow.
        clipped = min(max(took / profiled, self.value / 2), self.value * 2)
        moved = self.value + _SMOOTHING * (clipped - self.value)
        self.value = min(max(moved, _MIN_FACTOR), _MAX_FACTOR)


class CoreShares:
    """The cores of a model's engine threads, one each, as calls of a `ThreadedEngine` share them.

    Times are monotonic, in seconds.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._calls, self._lull_ends = 0, 0.0
        self._ratio = 1 / threads
        self._alone_until = 0.0

    def each(self, calls: int, now: float) -> int:
        """The cores of each call, where so many run or wait; fewer than did just now may be a lull."""
        if calls >= self._calls or now > self._lull_ends:
            self._calls, self._lull_ends = calls, now + _LULL_S
        if now < self._alone_until:
            return 1
        return min(MOST_CORES, self._threads // max(1, min(self._calls, self._threads)))

    def observe(self, took_ms: float, one_core_ms: float, now: float) -> None:
        """Record a call that had several cores from begin to end; one_core_ms: what it would take on one.

        Where several do not pay, calls get one core each for a second. Then the first one decides.
        """
        ratio = min(_MOST_RATIO, took_ms / one_core_ms) if one_core_ms > 0 else 0.0
        self._ratio += _RATIO_SMOOTHING * (ratio - self._ratio)
        if self._ratio > _WORTH:
            self._ratio, self._alone_until = _WORTH, now + _ALONE_S
