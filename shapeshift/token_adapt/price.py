"""What a millisecond of the device is worth: what plans for the images that wait owe to those that will come."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_RENEW_MS = 100.0
_HALVINGS = 16


class TimePrice:
    """The price at which the arrivals of the last `window_ms`, had all been there at once, would just have filled it.

    Each then takes the gamma at which its worth exceeds the price of its time by most, or none: the dual of Eq. 1
    without deadlines. The price is 0 where each could take the gamma that is worth most.
    """

    def __init__(self, window_ms: float) -> None:
        self._window_ms = window_ms
        self._arrivals: deque[tuple[float, Floats]] = deque()
        self._price = 0.0
        self._renew_at = -np.inf

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, arrived: float, brings: Floats) -> None:
        """A query has arrived; brings [g]: its worth at each gamma."""
        self._forget(arrived)
        self._arrivals.append((arrived, brings))

    def price(self, now: float, times: Floats) -> float:
        """Utility a millisecond; times [g]: what one image takes at each gamma."""
        if now >= self._renew_at:
            self._renew_at = now + _RENEW_MS
            self._forget(now)
            self._price = self._renewed(times)
        return self._price

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now - self._window_ms:
            self._arrivals.popleft()

    def _renewed(self, times: Floats) -> float:
        if not self._arrivals:
            return 0.0
        options = np.concatenate(([0.0], times))
        brings = np.zeros((len(self._arrivals), len(options)))
        brings[:, 1:] = [worth for _, worth in self._arrivals]

        def fits(price: float) -> bool:
            return float(options[np.argmax(brings - price * options, axis=1)].sum()) <= self._window_ms

        if fits(0.0):
            return 0.0
        low, high = 0.0, float((brings[:, 1:] / times).max())
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high
