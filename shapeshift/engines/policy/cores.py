"""How many cores a call takes of an engine that computes a pack on any number of them."""

from __future__ import annotations

MOST_CORES = 8
"""Of a call: a short text has no work for more."""
# Of the time on one core. Where recent calls take longer, other programs use the cores.
_WORTH = 0.8
_SMOOTHING, _MOST_RATIO = 0.2, 1.5
_ALONE_S = 1.0
# Clients that have got their answers together come back within it.
_LULL_S = 0.01


class CoreShares:
    """The cores of a model's engine threads, one each, as calls share them. Times are monotonic, in seconds."""

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
        self._ratio += _SMOOTHING * (ratio - self._ratio)
        if self._ratio > _WORTH:
            self._ratio, self._alone_until = _WORTH, now + _ALONE_S
