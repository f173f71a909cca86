"""What time is worth to requests that have not come yet.

A plan for the queue alone spends all the time that its deadlines leave on accuracy, and those who come next find the
device late. The price of a millisecond is the dual value of the device's time, were the queries of the last seconds
to come again and divided at will among the gammas: the least price at which what they would buy fits into the time.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_SPAN_MS = 2000.0
_HOLDS_MS = 100.0
_HALVINGS = 24


class TimePrice:
    """The price over the arrivals of the last two seconds; per_image_ms [g]: time of an image in a full batch."""

    def __init__(self, per_image_ms: Floats, started: float) -> None:
        self._per_image_ms = per_image_ms
        self._started = started
        self._arrivals: deque[tuple[float, Floats]] = deque()
        self._price = 0.0
        self._holds_until = started

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, arrived: float, worth: Floats) -> None:
        """A query has arrived whose answer in time is worth so much at each gamma, [g]."""
        self._arrivals.append((arrived, worth))
        self._forget(arrived)

    def price(self, now: float, factor: float = 1.0) -> float:
        """Utility a millisecond; `factor` scales the times. It is found anew every tenth of a second."""
        if now >= self._holds_until:
            self._forget(now)
            span = min(_SPAN_MS, max(now - self._started, _HOLDS_MS))
            worths = np.array([worth for _, worth in self._arrivals])
            self._price = least_price(worths, self._per_image_ms * factor, span)
            self._holds_until = now + _HOLDS_MS
        return self._price

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now - _SPAN_MS:
            self._arrivals.popleft()


def least_price(worths: Floats, times: Floats, available: float) -> float:
    """The least price at which queries [n, g] that choose their best gamma, or none, take at most `available` time."""
    if not worths.size or demand(worths, times, 0.0) <= available:
        return 0.0
    low, high = 0.0, float((worths / times).max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if demand(worths, times, middle) <= available:
            high = middle
        else:
            low = middle
    return high


def demand(worths: Floats, times: Floats, price: float) -> float:
    """The time that queries take at a price, each at the gamma that leaves it most; none where all leave nothing."""
    left = worths - price * times
    best = left.argmax(axis=1)
    wanted = left[np.arange(len(left)), best] > 0
    return float(times[best[wanted]].sum())
